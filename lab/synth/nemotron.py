"""Nemotron-H: a layer is state space, attention or experts; no gate; width and top-k differ by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lab.synth.gqa import attention
from lab.synth.shape import Shape, Tensor, bias, experts, norm, per_layer, router

N_CONV = 4
N_GROUP = 1
SSM, ATTENTION, EXPERTS = "s", "a", "e"  # letters of shape.extra["kinds"], one per layer


def _state_space(shape: Shape, layer: int) -> Iterator[Tensor]:
    blk, n_inner, n_state = f"blk.{layer}", shape.extra["ssm_inner"], shape.extra["ssm_state"]
    n_head, n_conv_in = (
        shape.extra["ssm_heads"],
        shape.extra["ssm_inner"] + 2 * N_GROUP * shape.extra["ssm_state"],
    )
    yield shape.trunk(f"{blk}.ssm_in.weight", shape.n_embd, 2 * n_inner + 2 * N_GROUP * n_state + n_head)
    yield Tensor(f"{blk}.ssm_conv1d.weight", (N_CONV, n_conv_in))
    yield bias(f"{blk}.ssm_conv1d.bias", n_conv_in)
    yield bias(f"{blk}.ssm_dt.bias", n_head)
    yield Tensor(f"{blk}.ssm_a", (1, n_head), fill="negative")
    yield bias(f"{blk}.ssm_d", 1, n_head, gain=1.0)
    yield norm(f"{blk}.ssm_norm", n_inner // N_GROUP, N_GROUP)
    yield shape.trunk(f"{blk}.ssm_out.weight", n_inner, shape.n_embd)


def nemotron(shape: Shape, layer: int) -> Iterator[Tensor]:
    kind = shape.extra["kinds"][layer]
    if kind == ATTENTION:
        yield from attention(shape, layer)
        return
    yield norm(f"blk.{layer}.attn_norm", shape.n_embd)
    if kind == SSM:
        yield from _state_space(shape, layer)
        return
    yield router(shape, layer)
    yield bias(f"blk.{layer}.exp_probs_b.bias", shape.n_expert)
    yield from experts(shape, layer, shape.n_embd)
    n_shared = shape.extra["n_ff_shared"]
    yield shape.trunk(f"blk.{layer}.ffn_up_shexp.weight", shape.n_embd, n_shared)
    yield shape.trunk(f"blk.{layer}.ffn_down_shexp.weight", n_shared, shape.n_embd)


def nemotron_kv(shape: Shape) -> dict[str, Any]:
    kinds, extra = shape.extra["kinds"], shape.extra
    used = [per_layer(shape.n_expert_used, layer) for layer in range(shape.n_layer)]
    return {
        "attention.head_count_kv": [shape.n_head_kv if kind == ATTENTION else 0 for kind in kinds],
        "attention.layer_norm_epsilon": 1e-6,
        "feed_forward_length": [shape.n_ff if kind == EXPERTS else 0 for kind in kinds],
        "expert_used_count": [n if kind == EXPERTS else 0 for n, kind in zip(used, kinds, strict=True)],
        "expert_shared_feed_forward_length": extra["n_ff_shared"],
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
        "ssm.conv_kernel": N_CONV,
        "ssm.inner_size": extra["ssm_inner"],
        "ssm.state_size": extra["ssm_state"],
        "ssm.time_step_rank": extra["ssm_heads"],
        "ssm.group_count": N_GROUP,
    }
