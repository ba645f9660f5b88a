"""Policies that keep experts in queues. Hits are noticed when the next victim is looked for.

Slru     probation and protected (4/5 of the slots): an expert that was hit is protected; evicts the least recently
         used of probation, then of protected. What is too much in protected goes back to probation.
S3Fifo   small (1/10) and main, both first in, first out. Out of small: to main if hit twice, else evicted and
         remembered. Out of main: back in with one hit less, evicted with none. Remembered ones come into main.
Arc      once (T1) and often (T2), both by last use, and the memory of what left them (B1, B2), which moves the
         target size of T1: up for a remembered one of B1, down for one of B2.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from .base import Ints, Keys, PoolPolicy, smallest

if TYPE_CHECKING:
    from .pool import Pool

__all__ = ["Arc", "S3Fifo", "Slru"]


class Slru(PoolPolicy):
    def _start(self, pool: Pool, n_keys: int) -> None:
        self._entered = np.zeros(n_keys, np.int64)  # freq when it came into probation
        self._n_protected_max = pool.n_slots * 4 // 5

    def coming(self, keys: Keys, freq: Ints, last_use: Ints, now: int) -> None:
        self._entered[keys] = freq[keys]

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        counts, used = freq.take(candidates), last_use.take(candidates)
        is_protected = counts > self._entered.take(candidates)
        protected = np.flatnonzero(is_protected)
        n_excess = len(protected) - self._n_protected_max
        if n_excess > 0:
            demoted = protected[smallest(n_excess, used[protected], counts[protected])]
            is_protected[demoted] = False
            self._entered[candidates[demoted]] = counts[demoted]
        return smallest(n, is_protected * (np.int64(1) << 50) + used, counts)


class S3Fifo(PoolPolicy):
    def _start(self, pool: Pool, n_keys: int) -> None:
        self._in_main = np.zeros(n_keys, np.bool_)
        self._stamp = np.zeros(n_keys, np.int64)  # order of arrival in its queue
        self._zero = np.zeros(n_keys, np.int64)  # freq at which it counts no hit
        self._n_stamps = 0
        self._ghosts: dict[int, None] = {}
        self._n_small_max = max(1, pool.n_slots // 10)
        self._n_ghosts_max = pool.n_slots

    def coming(self, keys: Keys, freq: Ints, last_use: Ints, now: int) -> None:
        for key in keys.tolist():
            self._enter(key, key in self._ghosts, int(freq[key]))
            self._ghosts.pop(key, None)

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        main = self._in_main.take(candidates)
        order = np.argsort(self._stamp.take(candidates))
        queues = {is_main: deque(order[main[order] == is_main].tolist()) for is_main in (False, True)}
        keys = candidates.tolist()
        chosen: list[int] = []
        while len(chosen) < n:
            in_main = bool(queues[True]) and len(queues[False]) <= self._n_small_max
            index = queues[in_main].popleft()
            key = keys[index]
            n_hits = min(int(freq[key] - self._zero[key]), 3)
            if n_hits > (0 if in_main else 1):
                self._enter(key, True, int(freq[key]) - (n_hits - 1 if in_main else 0))
                queues[True].append(index)
            else:
                chosen.append(index)
                if not in_main:
                    self._remember(key)
        return np.array(chosen, np.intp)

    def _enter(self, key: int, in_main: bool, zero: int) -> None:
        self._n_stamps += 1
        self._in_main[key], self._stamp[key], self._zero[key] = in_main, self._n_stamps, zero

    def _remember(self, key: int) -> None:
        self._ghosts[key] = None
        if len(self._ghosts) > self._n_ghosts_max:
            del self._ghosts[next(iter(self._ghosts))]


class Arc(PoolPolicy):
    def _start(self, pool: Pool, n_keys: int) -> None:
        self._entered = np.zeros(n_keys, np.int64)  # freq when it came in; -1: straight into T2
        self._target = 0.0  # of T1, slots
        self._b1: dict[int, None] = {}
        self._b2: dict[int, None] = {}
        self._n_slots = pool.n_slots

    def coming(self, keys: Keys, freq: Ints, last_use: Ints, now: int) -> None:
        self._entered[keys] = freq[keys]
        for key in keys.tolist():
            n_1, n_2 = len(self._b1), len(self._b2)
            if key in self._b1:
                self._target = min(self._n_slots, self._target + max(1.0, n_2 / n_1))
                del self._b1[key]
            elif key in self._b2:
                self._target = max(0.0, self._target - max(1.0, n_1 / n_2))
                del self._b2[key]
            else:
                continue
            self._entered[key] = -1

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        counts, used = freq.take(candidates), last_use.take(candidates)
        is_often = counts > self._entered.take(candidates)
        once, often = np.flatnonzero(~is_often), np.flatnonzero(is_often)
        n_once = min(len(once), n, max(len(once) - int(self._target), n - len(often), 0))
        from_once = once[smallest(n_once, used[once], counts[once])]
        from_often = often[smallest(n - n_once, used[often], counts[often])]
        self._b1.update(dict.fromkeys(candidates[from_once].tolist()))
        self._b2.update(dict.fromkeys(candidates[from_often].tolist()))
        n_t1 = len(once) - n_once
        _trim(self._b1, max(0, self._n_slots - n_t1))
        _trim(self._b2, max(0, 2 * self._n_slots - len(candidates) - len(self._b1)))
        return np.concatenate((from_once, from_often))


def _trim(ghosts: dict[int, None], n: int) -> None:
    while len(ghosts) > n:
        del ghosts[next(iter(ghosts))]
