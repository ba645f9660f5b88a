"""Tiny mixture-of-experts models, one for each way in which real ones differ; written in milliseconds.

VARIANTS maps a name to a function that writes the model into a folder and returns its (first) file. All are
deterministic, have 128 tokens, need no tokenizer and run in an unpatched llama.cpp on a CPU. No architecture
has another number of experts from layer to layer (there is one expert_count): "two-groups" has 8 and 4 in
each layer, "widths-by-layer" other widths and top-k per layer (only nemotron_h_moe and glm5-next allow that).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lab.synth.blocks import OTHER_TYPES, TYPES, WEIGHT_TYPES
from lab.synth.model import write_model
from lab.synth.shape import Shape

Variant = Callable[[Path], Path]

# Experts of these types: llama.cpp loads the file, then the process dies of SIGSEGV in the first evaluation,
# because the CPU backend has no dot product for them.
_NO_DOT_PRODUCT = "loads, then crashes in MUL_MAT_ID: no dot product"
REFUSED_TYPES: dict[str, str] = dict.fromkeys(OTHER_TYPES, _NO_DOT_PRODUCT)


def _by_role(gate: str, up: str = "", down: str = "") -> dict[str, tuple[str, ...]]:
    """Types by role; several layers' types are separated by commas."""
    given = {"gate": gate, "up": up or gate, "down": down or gate}
    return {role: tuple(types.split(",")) for role, types in given.items()}


TINY = Shape(
    arch="qwen3moe",
    n_layer=2,
    n_embd=256,
    n_head=2,
    n_head_kv=1,
    head_dim=32,
    n_ff=64,
    n_ff_exp=256,
    n_expert=5,
    n_expert_used=2,
    n_ctx=256,
    expert_types=_by_role("Q4_K"),
)
NARROW = replace(TINY, n_embd=96, n_ff_exp=64, n_expert=8, expert_types=_by_role("Q8_0"))


def shape_of_type(type_name: str) -> Shape:
    """Rows of one block where blocks are large; odd multiples of the block where they are small."""
    n = TYPES[type_name].n_elements
    n_embd, n_ff_exp = (n, n) if n >= 128 else (3 * max(n, 32), max(n, 32))
    return replace(TINY, n_embd=n_embd, n_ff_exp=n_ff_exp, expert_types=_by_role(type_name))


NO_GATE = replace(
    NARROW,
    arch="nemotron_h_moe",
    n_layer=4,
    expert_types={"up": ("Q5_0",), "down": ("Q8_0",)},
    extra={"kinds": "saee", "ssm_inner": 64, "ssm_state": 32, "ssm_heads": 2, "n_ff_shared": 32},
)

SHAPES: dict[str, Shape] = {
    **{f"type-{name}": shape_of_type(name) for name in WEIGHT_TYPES},
    "mixed-in-layer": replace(TINY, expert_types=_by_role("Q2_K", "IQ4_NL", "Q6_K")),
    "mixed-between-layers": replace(
        TINY, n_layer=4, n_expert=4, expert_types=_by_role("Q4_K,Q2_K", "Q4_K,IQ3_S,Q8_0", "Q6_K,Q3_K,Q5_K,F16")
    ),
    "gate-up": replace(
        TINY, arch="hy_v3", expert_types={"gate_up": ("Q4_0", "Q5_1"), "down": ("Q8_0",)}, n_embd=96, n_ff_exp=32
    ),
    "no-gate": NO_GATE,
    "expert-biases": replace(NARROW, arch="gpt-oss", expert_types=_by_role("MXFP4")),
    "expert-scales": replace(NARROW, expert_scales=True),
    "expert-scales-nvfp4": replace(
        TINY, n_embd=128, n_ff_exp=64, n_expert=8, expert_types=_by_role("NVFP4"), expert_scales=True
    ),
    "dense-first": replace(NARROW, arch="glm4moe", n_layer=4, n_expert_shared=1, dense_layers=(0, 1)),
    "dense-between": replace(NARROW, arch="hy_v3", n_layer=6, dense_layers=(0, 2, 3)),
    "interleaved": replace(NARROW, arch="llama4", n_layer=4, n_expert_used=1, extra={"moe_layer_step": 2}),
    "widths-by-layer": replace(
        NO_GATE,
        n_layer=6,
        n_ff_exp=(32, 64, 32, 96, 160, 64),
        n_expert_used=(1, 1, 2, 3, 1, 4),
        extra={**NO_GATE.extra, "kinds": "saeeee"},
    ),
    "two-groups": replace(
        NARROW, arch="grovemoe", expert_types=_by_role("Q5_1"), extra={"n_ff_chexp": 32, "n_group_experts": 2}
    ),
    "many-experts": replace(
        NARROW, n_embd=64, n_ff_exp=32, n_expert=640, n_expert_used=6, expert_types=_by_role("IQ4_NL")
    ),
    "one-expert-used": replace(NARROW, n_expert_used=1),
    "all-experts-used": replace(NARROW, n_expert_used=8),
    "odd-rows": replace(NARROW, n_embd=544, n_ff_exp=992, n_expert=4, n_layer=1, expert_types=_by_role("Q4_0")),
    "wide-rows": replace(TINY, n_embd=512, n_ff_exp=1024, n_expert=3, n_layer=1, expert_types=_by_role("Q2_K")),
    "latent": replace(
        NARROW,
        arch="kimi-k3",
        n_layer=5,
        n_expert_shared=1,
        dense_layers=(0,),
        expert_types=_by_role("Q4_0", "Q4_0", "Q5_0"),
        extra={"q_lora_rank": 32, "kv_lora_rank": 64, "n_rot": 32, "kda_head_dim": 32, "n_latent": 64},
    ),
    "hash-routed": replace(
        NARROW,
        arch="deepseek4",
        n_layer=5,
        n_embd=128,
        n_head=4,
        head_dim=64,
        n_expert_shared=1,
        expert_types=_by_role("MXFP4"),
        extra={
            "q_lora_rank": 32,
            "o_lora_rank": 32,
            "o_groups": 4,
            "n_rot": 32,
            "indexer_heads": 2,
            "indexer_key_length": 128,
            "hash_layers": 3,
        },
    ),
}


def _writer(name: str, shape: Shape, n_shards: int = 1) -> Variant:
    def write(folder: Path) -> Path:
        return write_model(folder / f"{name}.gguf", shape, n_shards=n_shards)

    return write


VARIANTS: dict[str, Variant] = {
    **{name: _writer(name, shape) for name, shape in SHAPES.items()},
    "split": _writer("split", NARROW, 3),
    # every role of a layer in another file
    "split-by-tensor": _writer("split-by-tensor", NARROW, 24),
}


def write_refused(folder: Path, type_name: str) -> Path:
    """A model with experts of a type in REFUSED_TYPES."""
    return write_model(folder / f"refused-{type_name}.gguf", shape_of_type(type_name))
