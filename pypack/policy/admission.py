"""Policies that let a newcomer stay only if it is worth a slot.

TinyLfu    newcomers pass a window (1/32 of the slots, by last use). The one that leaves it meets the least
           recently used expert of the rest: the one with the lower aged freq is evicted.
ByBudget   evicts the smallest aged freq / (age + patience). Where the pool holds less than a token uses, an expert
           would by recency be gone each time before it is used again: a long patience lets frequency decide, and
           rare experts are the first to go. The more tokens it holds, the shorter the patience, and recency decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .base import AgedFrequency, Ints, Keys, PoolPolicy, smallest
from .scores import aging_period

if TYPE_CHECKING:
    from .pool import Pool

__all__ = ["ByBudget", "TinyLfu"]


class TinyLfu(PoolPolicy):
    def _start(self, pool: Pool, n_keys: int) -> None:
        self._aged = AgedFrequency(n_keys, aging_period(pool))
        self._in_window = np.zeros(n_keys, np.bool_)
        self._n_window_max = pool.n_slots // 32
        self._n_settled = 0  # in the cache, in use or not
        self._n_settled_max = pool.n_slots - self._n_window_max

    def coming(self, keys: Keys, freq: Ints, last_use: Ints, now: int) -> None:
        self._in_window[keys] = True

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        used = last_use.take(candidates)
        in_window = self._in_window.take(candidates)
        n_room = max(0, self._n_settled_max - self._n_settled)  # while the rest is not full, nobody must leave it
        leaving = _oldest(np.flatnonzero(in_window), used, n_room + n)
        n_room = max(0, min(n_room, len(leaving) - n))
        self._n_settled += n_room
        in_window[leaving[:n_room]] = False
        self._in_window[candidates[leaving[:n_room]]] = False
        del leaving[:n_room]
        settled = _oldest(np.flatnonzero(~in_window), used, n)
        worth = self._aged.of(candidates, freq, now)
        chosen: list[int] = []
        while len(chosen) < n:
            if leaving and settled and worth[leaving[0]] > worth[settled[0]]:
                self._in_window[candidates[leaving[0]]] = False
                settled.append(leaving.pop(0))
                chosen.append(settled.pop(0))
            else:
                self._n_settled -= not leaving
                chosen.append((leaving or settled).pop(0))
        return np.array(chosen, np.intp)


def _oldest(indices: Keys, used: Ints, n: int) -> list[int]:
    """The n of indices with the smallest used, smallest first."""
    if n <= 0:
        return []
    near = indices[smallest(min(n, len(indices)), used[indices], indices)]
    oldest: list[int] = near[np.argsort(used[near], kind="stable")].tolist()
    return oldest


class ByBudget(PoolPolicy):
    is_ranking = True
    PATIENCE_TOKENS = 32  # divided by the tokens whose experts the pool holds
    HALF_LIFE_TOKENS = 24  # times those

    def _start(self, pool: Pool, n_keys: int) -> None:
        holds_tokens = max(1.0, pool.n_slots / max(1, pool.n_per_token))
        self._offset = max(1, int(self.PATIENCE_TOKENS / holds_tokens * len(pool.layers)))
        self._aged = AgedFrequency(n_keys, int(self.HALF_LIFE_TOKENS * holds_tokens * len(pool.layers)))

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        used = last_use.take(candidates)
        return smallest(n, self._aged.of(candidates, freq, now) / (now - used + self._offset), used)
