"""Who of a pool lies on the device and who in host memory: what is used more, on the device.

The pool's policy decides what it holds at all, over both; this moves nothing in or out. A use counts 1 at its token and less
with each token after it; experts change places while one in host memory counts for more than one on the device, by so much
that the copies pay.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..policy.base import Ints
from ..policy.pool import Pool

NONE = -1
Int32s = NDArray[np.int32]

MOVES = 16  # EXPERT_MOVES: more than there are spare blocks
HITS_A_PLAN = 16  # EXPERT_HITS_A_PLAN: fewer hits in host memory are not worth a plan
N_SPARE = 8  # blocks of a pool through which experts change places


class TierPlan:
    """The plan of one pool. Not thread-safe. ``slots``: the pool's."""

    KEPT = 63 / 64  # of a use, with each plan: one a token, where host memory is used much
    GAIN = 2.0  # by which an expert must count for more to take another one's place: a copy each way against reads in place

    def __init__(self, slots: NDArray[np.intp], n_keys: int) -> None:
        self._slots = slots
        self._counts = np.zeros(n_keys)
        self._freq = np.zeros(n_keys, np.int64)

    def plan(self, freq: Ints, owner: Ints, in_place: NDArray[np.uint8], up: Int32s, down: Int32s) -> None:
        """Write the slots whose experts should go up to the device and down to host memory, [MOVES] each, :data:`NONE` ends them.

        ``freq``: [n_keys] acquires that asked for the expert; ``owner``: [n_slots] keys; ``in_place``: [n_slots] 1 where the
        slot lies in host memory.
        """
        self._counts *= self.KEPT
        # a prompt counts as one token, and so do the tokens between two plans
        self._counts += np.minimum(freq - self._freq, 1)
        self._freq[:] = freq
        up[:] = down[:] = NONE
        held = self._slots[owner[self._slots] != NONE]
        counts = self._counts[owner[held]]
        in_host = in_place[held] != 0
        high, low = self._highest(held[in_host], counts[in_host]), self._highest(held[~in_host], -counts[~in_host])
        n = min(len(high), len(low))
        better = self._counts[owner[high[:n]]] > self._counts[owner[low[:n]]] + self.GAIN
        n = int(better.argmin()) if not better.all() else n
        up[:n], down[:n] = high[:n], low[:n]

    @staticmethod
    def _highest(slots: NDArray[np.intp], counts: NDArray[np.float64]) -> NDArray[np.intp]:
        """The MOVES slots that count most, in this order; of equals the first."""
        n = min(MOVES, len(slots))
        if n == 0:
            return slots[:0]
        limit = np.partition(counts, len(counts) - n)[len(counts) - n]
        (chosen,) = (counts >= limit).nonzero()
        highest: NDArray[np.intp] = slots[chosen[np.argsort(-counts[chosen], kind="stable")[:n]]]
        return highest


class Tiers:
    """The tables of all pools, shared with native, which says what they mean."""

    def __init__(self, n_keys: int, n_pools: int) -> None:
        self.in_place: NDArray[np.uint8] = np.zeros(n_keys, np.uint8)
        self.seen_freq: NDArray[np.int64] = np.zeros(n_keys, np.int64)
        self.seen_owner: NDArray[np.int64] = np.full(n_keys, NONE, np.int64)
        self.seen_in_place: NDArray[np.uint8] = np.zeros(n_keys, np.uint8)
        self.moves_up: Int32s = np.full((n_pools, MOVES), NONE, np.int32)
        self.moves_down: Int32s = np.full((n_pools, MOVES), NONE, np.int32)
        self._plans: dict[int, TierPlan] = {}

    def add(self, index: int, pool: Pool) -> None:
        """A pool, by its number, which has slots on both sides."""
        slots = np.arange(pool.first_slot, pool.first_slot + pool.n_slots)
        self._plans[index] = TierPlan(slots, len(self.seen_freq))

    def plan(self) -> None:
        """Choose the moves of all pools from what was seen."""
        for index, plan in list(self._plans.items()):  # an arena may be opened meanwhile
            up, down = self.moves_up[index], self.moves_down[index]
            plan.plan(self.seen_freq, self.seen_owner, self.seen_in_place, up, down)
