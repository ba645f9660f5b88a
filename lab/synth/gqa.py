"""Architectures with ordinary grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lab.synth.shape import Shape, Tensor, bias, dense_ffn, experts, norm, router

SIGMOID = 2  # expert_gating_func


def attention(shape: Shape, layer: int, *, qk_norm: bool = False) -> Iterator[Tensor]:
    """Norm and the four projections; ``qk_norm``: queries and keys are normalized, too."""
    blk, n_q, n_kv = f"blk.{layer}", shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    yield norm(f"{blk}.attn_norm", shape.n_embd)
    for name, ne in (("q", (shape.n_embd, n_q)), ("k", (shape.n_embd, n_kv)), ("v", (shape.n_embd, n_kv))):
        yield shape.trunk(f"{blk}.attn_{name}.weight", *ne)
    yield shape.trunk(f"{blk}.attn_output.weight", n_q, shape.n_embd)
    if qk_norm:
        yield norm(f"{blk}.attn_q_norm", shape.head_dim)
        yield norm(f"{blk}.attn_k_norm", shape.head_dim)


def qwen3moe(shape: Shape, layer: int) -> Iterator[Tensor]:
    yield from attention(shape, layer, qk_norm=True)
    yield norm(f"blk.{layer}.ffn_norm", shape.n_embd)
    yield router(shape, layer)
    yield from experts(shape, layer, shape.n_embd)


def grovemoe(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Two kinds of experts under one router: `n_group_experts` of the first share one of the second."""
    yield from qwen3moe(shape, layer)
    yield from experts(shape, layer, shape.n_embd, "chexps")


def grovemoe_kv(shape: Shape) -> dict[str, Any]:
    return {
        "expert_chunk_feed_forward_length": shape.extra["n_ff_chexp"],
        "experts_per_group": shape.extra["n_group_experts"],
        "expert_group_scale": 0.05,
    }


def glm4moe(shape: Shape, layer: int) -> Iterator[Tensor]:
    yield from attention(shape, layer)
    yield norm(f"blk.{layer}.post_attention_norm", shape.n_embd)
    if shape.is_dense(layer):
        yield from dense_ffn(shape, layer, shape.n_ff)
        return
    yield router(shape, layer)
    yield bias(f"blk.{layer}.exp_probs_b.bias", shape.n_expert)
    yield from experts(shape, layer, shape.n_embd)
    yield from dense_ffn(shape, layer, shape.ff_exp(layer) * shape.n_expert_shared, "_shexp")


def glm4moe_kv(shape: Shape) -> dict[str, Any]:
    return {
        "rope.dimension_count": shape.head_dim // 2,
        "leading_dense_block_count": len(shape.dense_layers),
        "expert_shared_count": shape.n_expert_shared,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": SIGMOID,
    }


def gpt_oss(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Biases on the router and on every expert."""
    blk, n_ff = f"blk.{layer}", shape.ff_exp(layer)
    yield from attention(shape, layer)
    yield bias(f"{blk}.attn_output.bias", shape.n_embd)
    yield bias(f"{blk}.attn_sinks.weight", shape.n_head)
    yield norm(f"{blk}.post_attention_norm", shape.n_embd)
    yield router(shape, layer)
    yield bias(f"{blk}.ffn_gate_inp.bias", shape.n_expert)
    yield from experts(shape, layer, shape.n_embd)
    for role, n in (("gate", n_ff), ("up", n_ff), ("down", shape.n_embd)):
        yield bias(f"{blk}.ffn_{role}_exps.bias", n, shape.n_expert, gain=0.5)


def gpt_oss_kv(shape: Shape) -> dict[str, Any]:
    return {"attention.sliding_window": 128}


def llama4(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Dense and expert layers in turn."""
    yield from attention(shape, layer)
    yield norm(f"blk.{layer}.ffn_norm", shape.n_embd)
    if (layer + 1) % shape.extra["moe_layer_step"]:
        yield from dense_ffn(shape, layer, shape.n_ff)
        return
    yield router(shape, layer)
    yield from experts(shape, layer, shape.n_embd)
    yield from dense_ffn(shape, layer, shape.ff_exp(layer), "_shexp")


def llama4_kv(shape: Shape) -> dict[str, Any]:
    return {"interleave_moe_layer_step": shape.extra["moe_layer_step"]}


def hy_v3(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Each layer dense or not as it likes; gate and up may be one tensor."""
    yield from attention(shape, layer, qk_norm=True)
    yield norm(f"blk.{layer}.ffn_norm", shape.n_embd)
    if shape.is_dense(layer):
        yield from dense_ffn(shape, layer, shape.n_ff)
        return
    yield router(shape, layer)
    yield bias(f"blk.{layer}.exp_probs_b", shape.n_expert)
    yield from experts(shape, layer, shape.n_embd)
    yield from dense_ffn(shape, layer, shape.ff_exp(layer), "_shexp")


def hy_v3_kv(shape: Shape) -> dict[str, Any]:
    return {
        "expert_shared_feed_forward_length": shape.ff_exp(0),
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": SIGMOID,
    }
