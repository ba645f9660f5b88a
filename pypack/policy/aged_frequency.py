"""How often each expert was asked for, where old use counts less: halved at intervals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import Ints, Keys
from .pool import Pool

HALF_LIFE_TOKENS = 256  # fewer tell little about one expert


def half_life(pool: Pool) -> int:
    """Acquires after which old use counts half, where a policy has no better number."""
    return HALF_LIFE_TOKENS * len(pool.layers)


class AgedFrequency:
    """Acquires that asked for each key, halved every ``period`` acquires."""

    def __init__(self, n_keys: int, period: int) -> None:
        self.period = max(1, period)
        self._due = self.period
        self._base = np.zeros(n_keys)
        self._seen = np.zeros(n_keys, np.int64)

    def of(self, keys: Keys, freq: Ints, now: int) -> NDArray[np.float64]:
        """[len(keys)]"""
        if now >= self._due:
            n_halvings = (now - self._due) // self.period + 1
            self._base = (self._base + (freq - self._seen)) * 0.5**n_halvings
            self._seen = freq.copy()
            self._due += n_halvings * self.period
        aged: NDArray[np.float64] = self._base.take(keys) + (freq.take(keys) - self._seen.take(keys))
        return aged
