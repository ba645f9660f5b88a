"""Policies that score each expert and evict the lowest scores.

    Lru               smallest last_use;             ties: the smallest freq
    FreqAge           smallest freq / (age + 1);     ties: the smallest last_use      age = now - last_use
    FreqThenRecency   smallest freq;                 ties: the smallest last_use
    AgedLfu           smallest aged freq;            ties: the smallest last_use      halved at intervals
    StaticHot         not pinned, smallest last_use; then pinned ones                 pinned once, by freq

Ties beyond these: the lowest slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .base import AgedFrequency, Ints, Keys, Policy, PoolPolicy, smallest

if TYPE_CHECKING:
    from .pool import Pool

__all__ = ["AgedLfu", "FreqAge", "FreqThenRecency", "Lru", "StaticHot", "aging_period"]


class Lru(Policy):
    is_ranking = True

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        return smallest(n, last_use.take(candidates), freq.take(candidates))


class FreqAge(Policy):
    is_ranking = True

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        used = last_use.take(candidates)
        return smallest(n, freq.take(candidates) / (now - used + 1), used)


class FreqThenRecency(Policy):
    is_ranking = True

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        return smallest(n, freq.take(candidates), last_use.take(candidates))


def aging_period(pool: Pool) -> int:
    """Acquires after which old use counts half: 256 tokens, fewer than which tell little about one expert."""
    return 256 * len(pool.layers)


class AgedLfu(PoolPolicy):
    is_ranking = True

    def _start(self, pool: Pool, n_keys: int) -> None:
        self._aged = AgedFrequency(n_keys, aging_period(pool))

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        return smallest(n, self._aged.of(candidates, freq, now), last_use.take(candidates))


class StaticHot(PoolPolicy):
    """After 512 tokens the most used experts are pinned for good, in all slots but an eighth."""

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
