"""freq-recency: the smallest frequency leaves. Of equals the least recently used."""

from __future__ import annotations

from .base import Ints, Keys, Policy, smallest


class FreqThenRecency(Policy):
    is_ranking = True

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        return smallest(n, freq.take(candidates), last_use.take(candidates))
