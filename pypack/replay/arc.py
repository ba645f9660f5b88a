"""arc: experts used once (T1) and often (T2), both by last use, and the memory of what left them (B1, B2).

The memory moves the target size of T1: up for a remembered one of B1 that comes again, down for one of B2. Hits are
noticed when a victim is sought.
"""

from __future__ import annotations

import numpy as np

from ..policy.base import Ints, Keys, PoolPolicy, smallest
from ..policy.pool import Pool


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
