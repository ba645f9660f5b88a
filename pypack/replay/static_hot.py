"""static-hot: after 512 tokens the most used experts are pinned for good, in all slots but an eighth.

Before that the smallest frequency leaves; then the least recently used of those not pinned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..policy.base import Ints, Keys, PoolPolicy, smallest
from ..policy.pool import Pool


class StaticHot(PoolPolicy):
    is_ranking = True
    WARM_TOKENS = 512

    def _start(self, pool: Pool, n_keys: int) -> None:
        self._seen = np.zeros(n_keys, np.bool_)
        self._n_pinned = pool.n_slots - max(1, pool.n_slots // 8)
        self._freeze_at = self.WARM_TOKENS * len(pool.layers)
        self._pinned: NDArray[np.bool_] | None = None

    def coming(self, keys: Keys, freq: Ints, last_use: Ints, now: int) -> None:
        self._seen[keys] = True

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        if self._pinned is None:
            if now < self._freeze_at:
                return smallest(n, freq.take(candidates), last_use.take(candidates))
            mine = np.flatnonzero(self._seen)
            self._pinned = np.zeros(len(freq), np.bool_)
            self._pinned[mine[np.argsort(-freq[mine], kind="stable")[: self._n_pinned]]] = True
        return smallest(n, self._pinned.take(candidates), last_use.take(candidates))
