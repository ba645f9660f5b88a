"""DeepSeek-V4: hyper-connections, compressed attention, and a few first layers that route by token id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lab.synth.shape import Shape, Tensor, bias, dense_ffn, ends, experts, norm, router

SQRT_SOFTPLUS = 4  # expert_gating_func
N_HYPER = 4


def _attention(shape: Shape, layer: int) -> Iterator[Tensor]:
    blk, extra = f"blk.{layer}", shape.extra
    n_heads, q_rank, n_groups = shape.n_head * shape.head_dim, extra["q_lora_rank"], extra["o_groups"]
    yield norm(f"{blk}.attn_norm", shape.n_embd)
    yield bias(f"{blk}.attn_sinks.weight", shape.n_head)
    yield shape.trunk(f"{blk}.attn_q_a.weight", shape.n_embd, q_rank)
    yield norm(f"{blk}.attn_q_a_norm", q_rank)
    yield shape.trunk(f"{blk}.attn_q_b.weight", q_rank, n_heads)
    yield shape.trunk(f"{blk}.attn_kv.weight", shape.n_embd, shape.head_dim)
    yield norm(f"{blk}.attn_kv_a_norm", shape.head_dim)
    yield shape.trunk(f"{blk}.attn_output_a.weight", n_heads // n_groups, extra["o_lora_rank"] * n_groups)
    yield shape.trunk(f"{blk}.attn_output_b.weight", extra["o_lora_rank"] * n_groups, shape.n_embd)


def _compressor(shape: Shape, layer: int, ratio: int) -> Iterator[Tensor]:
    """Keys of `ratio` tokens folded into one; at ratio 4 an indexer picks among them."""
    blk, n_wide = f"blk.{layer}", shape.head_dim * (2 if ratio == 4 else 1)
    yield shape.trunk(f"{blk}.attn_compressor_kv.weight", shape.n_embd, n_wide)
    yield shape.trunk(f"{blk}.attn_compressor_gate.weight", shape.n_embd, n_wide)
    yield bias(f"{blk}.attn_compressor_ape.weight", n_wide, ratio)
    yield norm(f"{blk}.attn_compressor_norm", shape.head_dim)
    if ratio != 4:
        return
    n_index_head, n_key = shape.extra["indexer_heads"], shape.extra["indexer_key_length"]
    yield shape.trunk(f"{blk}.indexer.proj.weight", shape.n_embd, n_index_head)
    yield shape.trunk(f"{blk}.indexer.attn_q_b.weight", shape.extra["q_lora_rank"], n_index_head * n_key)
    yield shape.trunk(f"{blk}.indexer_compressor_kv.weight", shape.n_embd, 2 * n_key)
    yield shape.trunk(f"{blk}.indexer_compressor_gate.weight", shape.n_embd, 2 * n_key)
    yield bias(f"{blk}.indexer_compressor_ape.weight", 2 * n_key, ratio)
    yield norm(f"{blk}.indexer_compressor_norm", n_key)


def _hyper_connection(name: str, n_embd: int, n_mix: int, n_scale: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}_fn.weight", (N_HYPER * n_embd, n_mix))
    yield bias(f"{name}_base.weight", n_mix)
    yield norm(f"{name}_scale", n_scale)


def compress_ratio(layer: int) -> int:
    """0, 0, then 4 and 128 in turn."""
    return 0 if layer < 2 else (4, 128)[layer % 2]


def deepseek4(shape: Shape, layer: int) -> Iterator[Tensor]:
    blk = f"blk.{layer}"
    yield from _attention(shape, layer)
    if compress_ratio(layer):
        yield from _compressor(shape, layer, compress_ratio(layer))
    for part in ("attn", "ffn"):
        yield from _hyper_connection(f"{blk}.hc_{part}", shape.n_embd, (2 + N_HYPER) * N_HYPER, 3)
    yield norm(f"{blk}.ffn_norm", shape.n_embd)
    yield router(shape, layer)
    if layer < shape.extra["hash_layers"]:
        ne = (int(shape.n_expert_used), shape.n_vocab)  # type: ignore[arg-type]
        yield Tensor(f"{blk}.ffn_gate_tid2eid.weight", ne, "I32", "hash_table", shape.n_expert)
    else:
        yield bias(f"{blk}.exp_probs_b.bias", shape.n_expert)
    yield from experts(shape, layer, shape.n_embd)
    yield from dense_ffn(shape, layer, shape.ff_exp(layer) * shape.n_expert_shared, "_shexp")


def deepseek4_ends(shape: Shape) -> Iterator[Tensor]:
    yield from ends(shape)
    yield from _hyper_connection("output_hc", shape.n_embd, N_HYPER, 1)


def deepseek4_kv(shape: Shape) -> dict[str, Any]:
    extra = shape.extra
    return {
        "attention.q_lora_rank": extra["q_lora_rank"],
        "attention.sliding_window": 128,
        "attention.indexer.head_count": extra["indexer_heads"],
        "attention.indexer.key_length": extra["indexer_key_length"],
        "attention.indexer.top_k": 512,
        "attention.output_group_count": extra["o_groups"],
        "attention.output_lora_rank": extra["o_lora_rank"],
        "attention.compress_ratios": [compress_ratio(layer) for layer in range(shape.n_layer)],
        "attention.compress_rope_freq_base": 160000.0,
        "rope.dimension_count": extra["n_rot"],
        "hyper_connection.count": N_HYPER,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": extra["hash_layers"],
        "swiglu_clamp_exp": [10.0] * shape.n_layer,
        "expert_shared_count": shape.n_expert_shared,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": SQRT_SOFTPLUS,
    }
