"""Policies that let a newcomer stay only if it is worth a slot.

    TinyLfu    newcomers pass a window (1/32 of the slots, by last use). The one that leaves it meets the least
               recently used expert of the rest: the one with the lower aged freq is evicted.
    ByBudget   where the pool holds what a few tokens use, recency tells most: FreqAge. Where it holds less, an
               expert is gone before it is used again unless it is kept for its frequency: AgedLfu, past which rare
               experts go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pypack.policy_base import AgedFrequency, Ints, Keys, Policy, smallest
from pypack.policy_scores import AgedLfu, FreqAge, aging_period

if TYPE_CHECKING:
    from pypack.budget import Pool

__all__ = ["ByBudget", "TinyLfu"]


class TinyLfu(Policy):
    def for_pool(self, pool: Pool, n_keys: int) -> Policy:
        policy = TinyLfu()
        policy._aged = AgedFrequency(n_keys, aging_period(pool))
        policy._in_window = np.zeros(n_keys, np.bool_)
        policy._n_window_max = pool.n_slots // 32
        policy._n_settled = 0  # in the cache, in use or not
        policy._n_settled_max = pool.n_slots - policy._n_window_max
        return policy

    _aged: AgedFrequency

    def coming(self, keys: Keys, freq: Ints, last_use: Ints, now: int) -> None:
        self._in_window[keys] = True

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        used = last_use.take(candidates)
        in_window = self._in_window.take(candidates)
        n_others = len(candidates) - int(in_window.sum())
        n_over = len(candidates) - n_others - self._n_window_max
        leaving = _oldest(np.flatnonzero(in_window), used, max(n_over, n - n_others))
        n_room = min(n_over, self._n_settled_max - self._n_settled)  # while the rest is not full, nobody must leave it
        if n_room > 0:
            self._n_settled += n_room
            in_window[leaving[:n_room]] = False
            self._in_window[candidates[leaving[:n_room]]] = False
            del leaving[:n_room]
        settled = _oldest(np.flatnonzero(~in_window), used, n)
        worth = self._aged.of(candidates, freq, now)
        chosen: list[int] = []
        while len(chosen) < n:
            if leaving and settled and worth[leaving[0]] > worth[settled[0]]:
                self._in_window[candidates[leaving.pop(0)]] = False
                chosen.append(settled.pop(0))
            else:
                self._n_settled -= not leaving
                chosen.append((leaving or settled).pop(0))
        return np.array(chosen, np.intp)


def _oldest(indices: Keys, used: Ints, n: int) -> list[int]:
    """The n of indices with the smallest used, smallest first."""
    if n <= 0:
        return []
    near = indices[smallest(min(n, len(indices)), used[indices], indices)]
    oldest: list[int] = near[np.argsort(used[near], kind="stable")].tolist()
    return oldest


class ByBudget(Policy):
    N_TOKENS = 4.0

    def for_pool(self, pool: Pool, n_keys: int) -> Policy:
        holds_tokens = pool.n_slots / max(1, pool.n_per_token)
        chosen = FreqAge() if holds_tokens >= self.N_TOKENS else AgedLfu()
        return chosen.for_pool(pool, n_keys)

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        raise NotImplementedError("for_pool() gives the policy that answers")
