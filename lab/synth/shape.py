"""The sizes of a model and the tensors that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lab.synth.blocks import TYPES, row_bytes


@dataclass(frozen=True)
class Tensor:
    """One tensor to write. `ne` is in ggml's order, columns first; `fill` is a name in lab.synth.fills."""

    name: str
    ne: tuple[int, ...]
    type: str = "F32"
    fill: str = "weight"
    gain: float = 1.0

    @property
    def n_elements(self) -> int:
        n = 1
        for extent in self.ne:
            n *= extent
        return n

    @property
    def n_bytes(self) -> int:
        """Bytes of its data; ValueError if rows do not fill blocks."""
        return row_bytes(self.type, self.ne[0]) * (self.n_elements // self.ne[0])


@dataclass(frozen=True)
class Shape:
    """Sizes, in llama.cpp's terms. A tuple gives one value per layer; a shorter one repeats."""

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_ff_exp: int | tuple[int, ...]
    n_expert: int
    n_expert_used: int | tuple[int, ...]
    n_vocab: int = 128
    n_ctx: int = 4096
    n_expert_shared: int = 0
    dense_layers: tuple[int, ...] = ()
    trunk_type: str = "F16"
    # ggml types of the routed experts, one per layer; the roles named here are those that the experts have
    expert_types: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"gate": ("F16",), "up": ("F16",), "down": ("F16",)}
    )
    expert_scales: bool = False
    router_spread: float = 0.3
    # what only one architecture has, by the names that its module gives
    extra: Mapping[str, Any] = field(default_factory=dict)

    def ff_exp(self, layer: int) -> int:
        """Inner width of the layer's experts."""
        return per_layer(self.n_ff_exp, layer)

    def expert_type(self, role: str, layer: int) -> str:
        """ggml's type of this role's weights in the layer."""
        types = self.expert_types[role]
        return types[layer % len(types)]

    def is_dense(self, layer: int) -> bool:
        return layer in self.dense_layers

    def trunk(self, name: str, *ne: int) -> Tensor:
        """A resident projection; rows that don't fill whole blocks get another type."""
        for type_name in (self.trunk_type, "Q8_0"):
            if ne[0] % TYPES[type_name].n_elements == 0:
                return Tensor(name, ne, type_name)
        return Tensor(name, ne, "F16")


def per_layer(value: int | tuple[int, ...], layer: int) -> int:
    """The layer's value of a size that may be a tuple."""
    return value if isinstance(value, int) else value[layer % len(value)]


def one_or_all(value: int | tuple[int, ...], n_layer: int) -> int | list[int]:
    """As metadata: one number, or one for each layer."""
    return value if isinstance(value, int) else [per_layer(value, layer) for layer in range(n_layer)]


def experts(shape: Shape, layer: int, n_in: int, group: str = "exps") -> Iterator[Tensor]:
    """The routed experts of a layer: each maps `n_in` values to `n_in` values."""
    n_ff, n_expert = shape.ff_exp(layer), shape.n_expert
    if group == "chexps":
        n_ff, n_expert = shape.extra["n_ff_chexp"], shape.n_expert // shape.extra["n_group_experts"]
    sizes = {"gate": (n_in, n_ff), "up": (n_in, n_ff), "gate_up": (n_in, 2 * n_ff), "down": (n_ff, n_in)}
    for role in shape.expert_types:
        name = f"blk.{layer}.ffn_{role}_{group}"
        yield Tensor(f"{name}.weight", (*sizes[role], n_expert), shape.expert_type(role, layer))
        if shape.expert_scales:
            yield Tensor(f"{name}.scale", (n_expert,), fill="norm", gain=3.0)


def dense_ffn(shape: Shape, layer: int, n_ff: int, suffix: str = "") -> Iterator[Tensor]:
    """gate, up and down of a dense layer, or of the shared expert (suffix "_shexp")."""
    for role, ne in (
        ("gate", (shape.n_embd, n_ff)),
        ("up", (shape.n_embd, n_ff)),
        ("down", (n_ff, shape.n_embd)),
    ):
        yield shape.trunk(f"blk.{layer}.ffn_{role}{suffix}.weight", *ne)


def router(shape: Shape, layer: int) -> Tensor:
    """The weights [n_embd, n_expert] that choose a token's experts."""
    ne = (shape.n_embd, shape.n_expert)
    return Tensor(f"blk.{layer}.ffn_gate_inp.weight", ne, fill="router", gain=shape.router_spread)


def norm(name: str, *ne: int) -> Tensor:
    """Scales of a normalization, around 1."""
    return Tensor(f"{name}.weight", ne, fill="norm")


def bias(name: str, *ne: int, gain: float = 0.05) -> Tensor:
    """Values around 0 with this root mean square."""
    return Tensor(name, ne, fill="embedding", gain=gain)


def ends(shape: Shape) -> Iterator[Tensor]:
    """Token embedding, final norm and output."""
    embedding = shape.trunk("token_embd.weight", shape.n_embd, shape.n_vocab)
    yield replace(embedding, fill="embedding")
    yield norm("output_norm", shape.n_embd)
    yield shape.trunk("output.weight", shape.n_embd, shape.n_vocab)


def common_kv(shape: Shape) -> dict[str, Any]:
    """Metadata that every architecture reads."""
    return {
        "vocab_size": shape.n_vocab,
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layer,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": 10000.0,
        "expert_count": shape.n_expert,
        "expert_used_count": one_or_all(shape.n_expert_used, shape.n_layer),
        "expert_feed_forward_length": one_or_all(shape.n_ff_exp, shape.n_layer),
    }
