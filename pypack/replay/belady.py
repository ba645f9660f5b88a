"""belady, belady-bypass: the best that any policy could have done, knowing the future.

belady          what is used again last leaves. Like a real cache, it keeps each missing expert in a slot.
belady-bypass   may throw a missing expert away at once: after each acquire the best n_slots of what was there and
                what came remain. No cache of this size has more hits, whatever it does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..placement.slots import NONE
from ..policy.base import Ints, Keys, Policy, smallest
from ..policy.pool import Pool
from .cache import ReplayCache


class Belady(Policy):
    """``next_use[key]``: number of the next acquire that will ask for it; the replay keeps it right."""

    def __init__(self) -> None:
        self.next_use: Ints = np.empty(0, np.int64)

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        return smallest(n, -self.next_use.take(candidates), candidates)


class BeladyBypass(Belady):
    """Chooses among what came, too: in a :class:`BypassCache`."""


class BypassCache(ReplayCache):
    """Slots have no numbers here: what is in the cache has place 0."""

    def load(self, pools: Sequence[Pool], policy: Policy) -> None:
        self._policy = policy
        self._n_slots = {layer: pool.n_slots for pool in pools for layer in pool.layers}
        self._first_layer = {layer: pool.layers[0] for pool in pools for layer in pool.layers}
        self._held = {pool.layers[0]: np.empty(0, np.intp) for pool in pools}

    def fetch_in_passes(self, layer: int, missing: Keys, hits: Keys, now: int) -> None:
        first_layer = self._first_layer[layer]
        held = np.concatenate((self._held[first_layer], missing))
        gone = self._policy.victims(held, len(held) - self._n_slots[layer], self.freq, self.last_use, now)
        self.reserved_slot[missing] = 0
        self.reserved_slot[held[gone]] = NONE
        self._held[first_layer] = held[self.reserved_slot[held] != NONE]


def future_of(start: NDArray[np.int64], keys: Keys) -> Ints:
    """[len(keys)] index of the next acquire that asks for the same key; len(start) if there is none."""
    event = np.repeat(np.arange(len(start) - 1), np.diff(start))
    order = np.argsort(keys, kind="stable")
    future = np.full(len(keys), len(start), np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    future[order[:-1][same]] = event[order[1:][same]]
    return future
