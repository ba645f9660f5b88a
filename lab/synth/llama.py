"""Llama, dense or with experts, as small story models are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lab.synth.gqa import attention
from lab.synth.shape import Shape, Tensor, dense_ffn, ends, experts, norm


def llama(shape: Shape, layer: int) -> Iterator[Tensor]:
    yield from attention(shape, layer)
    yield norm(f"blk.{layer}.ffn_norm", shape.n_embd)
    if shape.is_dense(layer):
        yield from dense_ffn(shape, layer, shape.n_ff)
        return
    # of the trunk's type: an F32 router's sums depend on the number of tokens in the batch
    yield replace(shape.trunk(f"blk.{layer}.ffn_gate_inp.weight", shape.n_embd, shape.n_expert), gain=2.0)
    yield from experts(shape, layer, shape.n_embd)


def llama_ends(shape: Shape) -> Iterator[Tensor]:
    """The output has favourites, so that sampling is not a lottery; it writes letters and hardly ever ends."""
    embedding, output_norm, output = ends(shape)
    yield embedding
    yield output_norm
    yield replace(output, fill="letters", gain=4.0)
