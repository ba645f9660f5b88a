"""by-budget: the smallest aged frequency / (age + patience) leaves. Of equals the least recently used.

Where the pool holds less than a token uses, an expert would by recency be gone each time before it is used again: a
long patience lets frequency decide, and rare experts are the first to go. The more tokens it holds, the shorter the
patience, and recency decides.
"""

from __future__ import annotations

from .aged_frequency import AgedFrequency
from .base import Ints, Keys, PoolPolicy, smallest
from .pool import Pool


class ByBudget(PoolPolicy):
    is_ranking = True
    PATIENCE_TOKENS = 32  # divided by the tokens whose experts the pool holds
    HALF_LIFE_TOKENS = 24  # times those

    def _start(self, pool: Pool, n_keys: int) -> None:
        holds_tokens = max(1.0, pool.n_slots / max(1, pool.n_per_token))
        self._patience = max(1, int(self.PATIENCE_TOKENS / holds_tokens * len(pool.layers)))
        self._aged = AgedFrequency(n_keys, int(self.HALF_LIFE_TOKENS * holds_tokens * len(pool.layers)))

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        used = last_use.take(candidates)
        return smallest(n, self._aged.of(candidates, freq, now) / (now - used + self._patience), used)
