"""freq-age: the smallest frequency / (age + 1) leaves, where age = now - last use. Of equals the least recently used."""

from __future__ import annotations

from .base import Ints, Keys, Policy, smallest


class FreqAge(Policy):
    is_ranking = True

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        used = last_use.take(candidates)
        return smallest(n, freq.take(candidates) / (now - used + 1), used)
