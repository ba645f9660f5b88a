"""Made-up traces with the habits of routers, for what no small model shows: many layers, drift, changes of topic.

Each layer has its own Zipf distribution over its experts: the expert of rank r is chosen with weight r^-skew. Three
things move it, as text does:

    drift     a share of the ranks changes places every 256 tokens
    topics    every `topic_tokens` tokens the ranks of half of the experts are those of another topic, which comes back
    repeat    with this probability a token chooses an expert of the token before again

Tokens come in requests: a prompt evaluated in batches, where an acquire names every expert that some token of the
batch uses, then single tokens. The same arguments give the same trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pypack.layout import Layer
from pypack.trace import Trace
from pypack.trace_format import Kind

__all__ = ["Habits", "synthetic_trace"]


@dataclass(frozen=True)
class Habits:
    """``n_tokens`` in requests of ``prompt_tokens`` (in batches of ``batch``) and ``answer_tokens``."""

    n_layers: int = 43
    n_experts: int = 256
    top_k: int = 6
    block_bytes: int = 13 << 20
    skew: float = 0.8
    drift: float = 0.02
    n_topics: int = 4
    topic_tokens: int = 1000
    repeat: float = 0.2
    prompt_tokens: int = 0
    batch: int = 512
    answer_tokens: int = 200
    n_tokens: int = 2000


def synthetic_trace(habits: Habits, seed: int = 1) -> Trace:
    random = np.random.default_rng(seed)
    chosen = np.stack([_choices(habits, random) for _ in range(habits.n_layers)])  # [layer, token, top_k]
    layer, step, number, ids = [], [], [], []
    for i, (first, last) in enumerate(_batches(habits)):
        for index in range(habits.n_layers):
            experts = np.unique(chosen[index, first:last])
            layer.append(index)
            step.append(i)
            number.append((last - first) * habits.top_k)
            ids.append(experts)
    sizes = np.array([len(experts) for experts in ids], np.int64)
    h = habits
    layers = tuple(Layer(i, i, "exps", h.n_experts, i * h.n_experts, h.block_bytes, ()) for i in range(h.n_layers))
    return Trace(
        "synthetic", "", h.top_k, layers, np.full(len(layer), Kind.ACQUIRE, np.uint8), np.array(layer, np.int32),
        np.array(step, np.int64), np.array(number, np.int64), np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes))),
        np.concatenate(ids).astype(np.int32),
    )  # fmt: skip


def _batches(habits: Habits) -> list[tuple[int, int]]:
    """(first, last + 1) token of each batch."""
    batches: list[tuple[int, int]] = []
    at = 0
    while at < habits.n_tokens:
        prompt_end = min(at + habits.prompt_tokens, habits.n_tokens)
        while at < prompt_end:
            batches.append((at, min(at + habits.batch, prompt_end)))
            at = batches[-1][1]
        for _ in range(min(habits.answer_tokens, habits.n_tokens - at)):
            batches.append((at, at + 1))
            at += 1
    return batches


def _choices(habits: Habits, random: np.random.Generator) -> NDArray[np.int64]:
    """[token, top_k] distinct experts of each token in one layer."""
    n = habits.n_experts
    log_weight = -habits.skew * np.log(np.arange(1, n + 1))
    topics = [random.permutation(n) for _ in range(habits.n_topics)]  # rank -> expert
    half = random.permutation(n)[: n // 2]
    for topic in topics[1:]:
        topic[:] = _same_ranks_but(topics[0], half, random)
    chosen = np.empty((habits.n_tokens, habits.top_k), np.int64)
    previous = np.empty(0, np.int64)
    for token in range(habits.n_tokens):
        if token % 256 == 0:
            for topic in topics:
                _swap(topic, int(habits.drift * n), random)
            score_of = [_by_expert(topic, log_weight) for topic in topics]
        score = score_of[token // habits.topic_tokens % habits.n_topics] + random.gumbel(size=n)
        again = previous[random.random(len(previous)) < habits.repeat]
        score[again] = np.inf
        previous = chosen[token] = np.argpartition(score, n - habits.top_k)[n - habits.top_k :]
    return chosen


def _by_expert(topic: NDArray[np.int64], log_weight: NDArray[np.float64]) -> NDArray[np.float64]:
    score = np.empty(len(topic))
    score[topic] = log_weight
    return score


def _same_ranks_but(topic: NDArray[np.int64], experts: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
    """The topic with these experts' ranks exchanged among them."""
    places = np.flatnonzero(np.isin(topic, experts))
    changed = topic.copy()
    changed[places] = random.permutation(topic[places])
    return changed


def _swap(topic: NDArray[np.int64], n: int, random: np.random.Generator) -> None:
    places = random.permutation(len(topic))[: 2 * n]
    topic[places] = topic[places[::-1]]
