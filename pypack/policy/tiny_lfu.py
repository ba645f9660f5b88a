"""tiny-lfu: a newcomer stays only if it is worth more than who would leave.

Newcomers pass a window (1/32 of the slots), the least recently used one first. The one that leaves it meets the least
recently used expert of the rest: the one with the lower aged frequency leaves.
"""

from __future__ import annotations

import numpy as np

from .aged_frequency import AgedFrequency, half_life
from .base import Ints, Keys, PoolPolicy, smallest
from .pool import Pool


class TinyLfu(PoolPolicy):
    def _start(self, pool: Pool, n_keys: int) -> None:
        self._aged = AgedFrequency(n_keys, half_life(pool))
        self._in_window = np.zeros(n_keys, np.bool_)
        self._n_settled = 0  # in the cache, in use or not
        self._n_settled_max = pool.n_slots - pool.n_slots // 32

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
