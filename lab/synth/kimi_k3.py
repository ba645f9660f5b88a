"""Kimi-K3: three layers of linear attention to one of latent attention, and experts in a latent space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lab.synth.gqa import SIGMOID
from lab.synth.shape import Shape, Tensor, bias, dense_ffn, ends, experts, norm, router

N_CONV = 4


def is_full_attention(layer: int) -> bool:
    return layer % 4 == 3


def _linear_attention(shape: Shape, layer: int) -> Iterator[Tensor]:
    blk, n_head_dim = f"blk.{layer}", shape.extra["kda_head_dim"]
    n_inner = shape.n_head * n_head_dim
    for name in ("q", "k", "v"):
        yield Tensor(f"{blk}.ssm_conv1d_{name}.weight", (N_CONV, 1, n_inner))
        yield shape.trunk(f"{blk}.attn_{name}.weight", shape.n_embd, n_inner)
    yield shape.trunk(f"{blk}.ssm_f_a.weight", shape.n_embd, n_head_dim)
    yield shape.trunk(f"{blk}.ssm_f_b.weight", n_head_dim, n_inner)
    yield shape.trunk(f"{blk}.ssm_beta.weight", shape.n_embd, shape.n_head)
    yield Tensor(f"{blk}.ssm_a", (shape.n_head,), fill="negative")
    yield bias(f"{blk}.ssm_dt.bias", n_inner)
    yield shape.trunk(f"{blk}.ssm_g.weight", shape.n_embd, n_inner)
    yield norm(f"{blk}.ssm_norm", n_head_dim)
    yield shape.trunk(f"{blk}.attn_output.weight", n_inner, shape.n_embd)


def _latent_attention(shape: Shape, layer: int) -> Iterator[Tensor]:
    blk, extra = f"blk.{layer}", shape.extra
    q_rank, kv_rank, n_rot = extra["q_lora_rank"], extra["kv_lora_rank"], extra["n_rot"]
    n_nope = n_value = shape.head_dim
    yield shape.trunk(f"{blk}.attn_q_a.weight", shape.n_embd, q_rank)
    yield norm(f"{blk}.attn_q_a_norm", q_rank)
    yield shape.trunk(f"{blk}.attn_q_b.weight", q_rank, shape.n_head * (n_nope + n_rot))
    yield shape.trunk(f"{blk}.attn_kv_a_mqa.weight", shape.n_embd, kv_rank + n_rot)
    yield norm(f"{blk}.attn_kv_a_norm", kv_rank)
    yield shape.trunk(f"{blk}.attn_k_b.weight", n_nope, kv_rank, shape.n_head)
    yield shape.trunk(f"{blk}.attn_v_b.weight", kv_rank, n_value, shape.n_head)
    yield shape.trunk(f"{blk}.attn_gate.weight", shape.n_embd, shape.n_head * n_value)
    yield shape.trunk(f"{blk}.attn_output.weight", shape.n_head * n_value, shape.n_embd)


def kimi_k3(shape: Shape, layer: int) -> Iterator[Tensor]:
    blk, n_latent = f"blk.{layer}", shape.extra["n_latent"]
    yield norm(f"{blk}.attn_norm", shape.n_embd)
    yield from (_latent_attention if is_full_attention(layer) else _linear_attention)(shape, layer)
    yield norm(f"{blk}.ffn_norm", shape.n_embd)
    for part in ("attn", "ffn"):
        yield Tensor(f"{blk}.{part}_res_score.weight", (shape.n_embd,))
    if shape.is_dense(layer):
        yield from dense_ffn(shape, layer, shape.n_ff)
        return
    yield router(shape, layer)
    yield bias(f"{blk}.exp_probs_b.bias", shape.n_expert)
    yield from experts(shape, layer, n_latent)
    yield shape.trunk(f"{blk}.ffn_routed_down.weight", shape.n_embd, n_latent)
    yield shape.trunk(f"{blk}.ffn_routed_up.weight", n_latent, shape.n_embd)
    yield norm(f"{blk}.ffn_routed_norm", n_latent)
    yield from dense_ffn(shape, layer, shape.ff_exp(layer) * shape.n_expert_shared, "_shexp")


def kimi_k3_ends(shape: Shape) -> Iterator[Tensor]:
    yield from ends(shape)
    yield Tensor("output_res_score.weight", (shape.n_embd,))


def kimi_k3_kv(shape: Shape) -> dict[str, Any]:
    extra = shape.extra
    return {
        "attention.head_count_kv": [int(is_full_attention(layer)) for layer in range(shape.n_layer)],
        "attention.q_lora_rank": extra["q_lora_rank"],
        "attention.kv_lora_rank": extra["kv_lora_rank"],
        "attention.key_length": extra["kv_lora_rank"] + extra["n_rot"],
        "attention.value_length": extra["kv_lora_rank"],
        "attention.key_length_mla": shape.head_dim + extra["n_rot"],
        "attention.value_length_mla": shape.head_dim,
        "rope.dimension_count": extra["n_rot"],
        "ssm.conv_kernel": N_CONV,
        "kda.head_dim": extra["kda_head_dim"],
        "kda.gate_lower_bound": -5.0,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
        "leading_dense_block_count": len(shape.dense_layers),
        "expert_latent_length": extra["n_latent"],
        "expert_shared_count": shape.n_expert_shared,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": SIGMOID,
    }
