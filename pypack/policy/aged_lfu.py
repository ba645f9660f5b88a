"""aged-lfu: the smallest frequency leaves, where old use counts less. Of equals the least recently used."""

from __future__ import annotations

from .aged_frequency import AgedFrequency, half_life
from .base import Ints, Keys, PoolPolicy, smallest
from .pool import Pool


class AgedLfu(PoolPolicy):
    is_ranking = True

    def _start(self, pool: Pool, n_keys: int) -> None:
        self._aged = AgedFrequency(n_keys, half_life(pool))

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        return smallest(n, self._aged.of(candidates, freq, now), last_use.take(candidates))
