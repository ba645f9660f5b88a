"""Made-up traces with the habits of routers, for what no small model shows: many layers, drift, changes of topic.

Each layer has its own Zipf distribution over its experts: the expert of rank r is chosen with weight r^-skew. Three
things move it, as text does:

    drift     a share of the ranks changes places every DRIFT_TOKENS tokens
    topics    every `topic_tokens` tokens the ranks of half of the experts are those of another topic, which comes back
    repeat    with this probability a token chooses an expert of the token before again

Tokens come one at a time. The same arguments give the same trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llama_expert_pack.pypack.format.layout import Layer
from llama_expert_pack.pypack.trace.format import Kind
from llama_expert_pack.pypack.trace.trace import Trace

DRIFT_TOKENS = 256


@dataclass(frozen=True)
class Habits:
    n_layers: int = 12
    n_experts: int = 256
    top_k: int = 6
    block_bytes: int = 13 << 20
    skew: float = 0.8
    drift: float = 0.02
    n_topics: int = 4
    topic_tokens: int = 300
    repeat: float = 0.2
    n_tokens: int = 1200


def synthetic_trace(habits: Habits, seed: int = 1) -> Trace:
    h = habits
    chosen = _choices(h, np.random.default_rng(seed))
    n_events = h.n_tokens * h.n_layers
    layers = tuple(Layer(i, i, "exps", h.n_experts, i * h.n_experts, h.block_bytes, ()) for i in range(h.n_layers))
    return Trace(
        path="synthetic",
        policy="",
        top_k=h.top_k,
        layers=layers,
        kind=np.full(n_events, Kind.ACQUIRE, np.uint8),
        layer=np.tile(np.arange(h.n_layers, dtype=np.int32), h.n_tokens),
        step=np.repeat(np.arange(h.n_tokens), h.n_layers),
        number=np.full(n_events, h.top_k, np.int64),
        start=np.arange(n_events + 1) * h.top_k,
        ids=np.sort(chosen, axis=2).reshape(-1),
    )


def _choices(habits: Habits, random: np.random.Generator) -> NDArray[np.int32]:
    """[token, layer, top_k] distinct experts: those with the largest log weight + Gumbel noise."""
    n, n_layers = habits.n_experts, habits.n_layers
    log_weight = -habits.skew * np.log(np.arange(1, n + 1, dtype=np.float32))
    topics = _topics(habits, random)
    rows = np.arange(n_layers)[:, None]
    chosen = np.empty((habits.n_tokens, n_layers, habits.top_k), np.int32)
    score_of = np.empty((habits.n_topics, n_layers, n), np.float32)
    for token in range(habits.n_tokens):
        if token % DRIFT_TOKENS == 0:
            for topic, scores in zip(topics, score_of, strict=True):
                _swap(topic, int(habits.drift * n), random)
                np.put_along_axis(scores, topic, np.broadcast_to(log_weight, topic.shape), 1)
        noise = -np.log(np.maximum(random.standard_exponential((n_layers, n), np.float32), np.float32(1e-30)))
        score = score_of[token // habits.topic_tokens % habits.n_topics] + noise
        if token:
            again = random.random((n_layers, habits.top_k)) < habits.repeat
            previous = chosen[token - 1]
            score[rows, previous] += np.where(again, np.float32(1e6), np.float32(0))
        chosen[token] = np.argpartition(score, n - habits.top_k, axis=1)[:, n - habits.top_k :]
    return chosen


def _topics(habits: Habits, random: np.random.Generator) -> list[NDArray[np.int64]]:
    """[layer, rank] -> expert, for each topic; topics give half of the experts, the same ones, other ranks."""
    n = habits.n_experts
    first = np.stack([random.permutation(n) for _ in range(habits.n_layers)])
    topics = [first.copy() for _ in range(habits.n_topics)]
    for layer in range(habits.n_layers):
        ranks = random.permutation(n)[: n // 2]
        for topic in topics[1:]:
            topic[layer, ranks] = random.permutation(first[layer, ranks])
    return topics


def _swap(topic: NDArray[np.int64], n: int, random: np.random.Generator) -> None:
    for row in topic:
        ranks = random.permutation(len(row))[: 2 * n]
        row[ranks] = row[ranks[::-1]]


PRESETS: dict[str, Habits] = {
    # DeepSeek-V4-Flash's shape, 12 of its layers; the same with weak favourites, but a token likes what the one before used
    "synthetic-dsv4": Habits(),
    "synthetic-recent": Habits(skew=0.4, repeat=0.4),
    # Kimi-K3's shape, 6 of its layers
    "synthetic-k3": Habits(n_layers=6, n_experts=896, top_k=16, block_bytes=11 << 20, n_tokens=800),
}
