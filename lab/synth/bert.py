"""Encoders: Nomic's BERT with experts in every second layer, for embeddings; plain BERT with a rank head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lab.synth.shape import Shape, Tensor, bias, experts, norm, router

POOLING_CLS, POOLING_RANK = 2, 4
MOE_EVERY_N_LAYERS = 2


def _layer_norm(name: str, n_embd: int) -> Iterator[Tensor]:
    yield norm(name, n_embd)
    yield bias(f"{name}.bias", n_embd)


def bert(shape: Shape, layer: int) -> Iterator[Tensor]:
    blk, n_embd = f"blk.{layer}", shape.n_embd
    for name in ("q", "k", "v", "output"):
        yield shape.trunk(f"{blk}.attn_{name}.weight", n_embd, n_embd)
    yield from _layer_norm(f"{blk}.attn_output_norm", n_embd)
    if shape.is_dense(layer):
        yield shape.trunk(f"{blk}.ffn_up.weight", n_embd, shape.n_ff)
        yield shape.trunk(f"{blk}.ffn_down.weight", shape.n_ff, n_embd)
    else:
        yield router(shape, layer)
        yield from experts(shape, layer, n_embd)
    yield from _layer_norm(f"{blk}.layer_output_norm", n_embd)


def bert_ends(shape: Shape) -> Iterator[Tensor]:
    yield replace(shape.trunk("token_embd.weight", shape.n_embd, shape.n_vocab), fill="embedding")
    yield bias("token_types.weight", shape.n_embd, 2)
    yield from _layer_norm("token_embd_norm", shape.n_embd)


def rank_ends(shape: Shape) -> Iterator[Tensor]:
    yield from bert_ends(shape)
    yield bias("position_embd.weight", shape.n_embd, shape.n_ctx)
    yield Tensor("cls.weight", (shape.n_embd, shape.n_embd))
    yield bias("cls.bias", shape.n_embd)
    yield Tensor("cls.output.weight", (shape.n_embd, 1))
    yield bias("cls.output.bias", 1)


def nomic_bert_moe_kv(shape: Shape) -> dict[str, Any]:
    return _encoder_kv(POOLING_CLS) | {"moe_every_n_layers": MOE_EVERY_N_LAYERS}


def rank_kv(shape: Shape) -> dict[str, Any]:
    return _encoder_kv(POOLING_RANK)


def _encoder_kv(pooling_type: int) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": 1e-6, "attention.causal": False, "pooling_type": pooling_type}
