"""What random data a tensor is filled with, by the role that it plays in a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.synth.blocks import generator, row_bytes, uniform, weights
from lab.synth.shape import Tensor

Chunks = Iterator[NDArray[Any]]


def _weight(tensor: Tensor, bits: np.random.SFC64) -> Chunks:
    """A projection that keeps the size of its input: rms = gain / sqrt(columns)."""
    return weights(tensor.type, bits, tensor.n_elements, tensor.gain / math.sqrt(tensor.ne[0]))


def _embedding(tensor: Tensor, bits: np.random.SFC64) -> Chunks:
    return weights(tensor.type, bits, tensor.n_elements, tensor.gain)


def _letters(tensor: Tensor, bits: np.random.SFC64) -> Chunks:
    """An output for llama's tokenizer: control tokens and bytes, the first 259, have logit 0, far from the best."""
    n_zero = row_bytes(tensor.type, tensor.ne[0]) * 259
    for chunk in _weight(tensor, bits):
        data = chunk.reshape(-1).view(np.uint8)
        data[:n_zero] = 0  # zero scales
        n_zero = max(0, n_zero - data.size)
        yield data


def _norm(tensor: Tensor, bits: np.random.SFC64) -> Chunks:
    """Around 1."""
    yield 1 + uniform(bits, tensor.n_elements, 0.1 * tensor.gain)


def _negative(tensor: Tensor, bits: np.random.SFC64) -> Chunks:
    """State decay of a recurrent layer, in [-2 gain, -gain)."""
    yield -tensor.gain * (1 + np.abs(uniform(bits, tensor.n_elements, 1 / math.sqrt(3))))


def _router(tensor: Tensor, bits: np.random.SFC64) -> Chunks:
    """A router with favourites: a long row wins more often, so a few experts get much of the work.

    `gain`, 0 to 1, is about the standard deviation of the logarithm of the rows' lengths; 0 makes experts equal.
    """
    n_columns, n_experts = tensor.ne
    # (1 + x) / (1 - x) stands in for exp(2 x), whose last bit depends on the machine.
    x = uniform(bits, n_experts, tensor.gain / 2)[:, None]
    lengths = (1 + x) / (1 - x)
    rows = uniform(bits, tensor.n_elements, 2 / math.sqrt(n_columns)).reshape(n_experts, n_columns)
    yield (rows * lengths).astype(np.float32)


def _hash_table(tensor: Tensor, bits: np.random.SFC64) -> Chunks:
    """[top-k, vocabulary] int32: the experts of each token, all different. `gain`: number of experts."""
    n_used, n_vocab = tensor.ne
    n_experts = int(tensor.gain)
    raw = bits.random_raw(2 * n_vocab).reshape(n_vocab, 2)
    start = raw[:, :1] % n_experts
    # Steps of 1 .. n_experts // n_used stay within one turn, so no expert comes twice.
    step = 1 + raw[:, 1:] % max(1, n_experts // n_used)
    yield ((start + step * np.arange(n_used, dtype=np.uint64)) % n_experts).astype(np.int32)


FILLS: dict[str, Callable[[Tensor, np.random.SFC64], Chunks]] = {
    "weight": _weight,
    "embedding": _embedding,
    "letters": _letters,
    "norm": _norm,
    "negative": _negative,
    "router": _router,
    "hash_table": _hash_table,
}


def fill(tensor: Tensor, seed: int) -> Iterator[memoryview]:
    """Yields the tensor's data in pieces of a few MiB."""
    for array in FILLS[tensor.fill](tensor, generator(seed, tensor.name)):
        yield np.ascontiguousarray(array).data.cast("B")
