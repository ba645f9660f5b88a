"""slru: probation, and protected (4/5 of the slots) for experts that were hit. Hits are noticed when a victim is sought.

The least recently used of probation leaves, then of protected. What is too much in protected goes back to probation.
"""

from __future__ import annotations

import numpy as np

from ..policy.base import Ints, Keys, PoolPolicy, smallest
from ..policy.pool import Pool


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
