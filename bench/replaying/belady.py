"""The best any policy could have done, knowing the future.

Belady        evicts what is used again last. Like a real cache, it keeps each missing expert in a slot.
BeladyBypass  may throw a missing expert away at once: after each acquire the best n_slots of what was there and
              what came remain. No cache of this size has more hits, whatever it does. Only replay.c knows it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llama_expert_pack.pypack.policy.base import Ints, Keys, Policy, smallest

__all__ = ["Belady", "BeladyBypass", "future_of"]


class Belady(Policy):
    """``next_use[key]``: number of the next acquire that will ask for it; the replay keeps it right."""

    def __init__(self, n_keys: int) -> None:
        self.next_use = np.zeros(n_keys, np.int64)

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        return smallest(n, -self.next_use.take(candidates), candidates)


class BeladyBypass(Belady):
    """In replay.c a rule of its own."""


def future_of(start: NDArray[np.int64], keys: NDArray[np.intp]) -> NDArray[np.int64]:
    """[len(keys)] index of the next acquire that asks for the same key; len(start) if there is none."""
    event = np.repeat(np.arange(len(start) - 1), np.diff(start))
    order = np.argsort(keys, kind="stable")
    future = np.full(len(keys), len(start), np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    future[order[:-1][same]] = event[order[1:][same]]
    return future
