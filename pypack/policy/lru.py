"""lru: the least recently used leaves. Of equals the least used, then the one in the lowest slot."""

from __future__ import annotations

from .base import Ints, Keys, Policy, smallest


class Lru(Policy):
    is_ranking = True

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        return smallest(n, last_use.take(candidates), freq.take(candidates))
