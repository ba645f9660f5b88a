"""Which slots a fetch gets, and which are published to be taken next: the live cache and the replay both ask here.

A fetch gets the published slots, in order, if enough of them can go; else free ones, then those of the policy's
victims. Published are free slots, then what the policy ranks first: a choice for the fetch after this one, which need
not wait for it. Policies that can't rank publish nothing and are asked at every fetch.

Native takes published slots by itself (``take_next_slots`` in native/src) and asks for the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import BudgetError
from ..policy.base import Keys, Policy
from ..policy.pool import Pool

N_NEXT = 64  # EXPERT_NEXT_SLOTS: enough for the experts of a few tokens beside those in use
NONE = -1

Int32s = NDArray[np.int32]
Slots = NDArray[np.intp]


class Tables:
    """Where the experts are and how they were used; :data:`NONE`: nowhere, nobody."""

    def __init__(self, n_keys: int) -> None:
        self.slot_of: Int32s = np.full(n_keys, NONE, np.int32)  # [n_keys] where the expert is
        self.reserved_slot: Int32s = np.full(n_keys, NONE, np.int32)  # [n_keys] where it is, or is being read to
        self.owner: NDArray[np.int64] = np.full(n_keys, NONE, np.int64)  # [n_slots <= n_keys] key
        self.freq: NDArray[np.int64] = np.zeros(n_keys, np.int64)  # [n_keys] acquires that asked for the expert
        self.last_use: NDArray[np.int64] = np.zeros(n_keys, np.int64)  # [n_keys] number of the last of them


class PoolSlots:
    """The slots of one pool. Not thread-safe. ``next_slots``: [N_NEXT] what is published; :data:`NONE` ends it."""

    def __init__(self, pool: Pool, policy: Policy, tables: Tables, next_slots: Int32s) -> None:
        self.n_slots = pool.n_slots
        self._first = pool.first_slot
        self._slots = np.arange(pool.first_slot, pool.first_slot + pool.n_slots)
        self._policy = policy.for_pool(pool, len(tables.freq))
        self._tables = tables
        self._owner = tables.owner[pool.first_slot : pool.first_slot + pool.n_slots]
        self._next_slots = next_slots
        self.prepare(np.empty(0, np.intp), 0)

    def take(self, keys: Keys, kept: Int32s, now: int) -> tuple[Slots, int]:
        """A slot for each of ``keys``, in order, none of the slots ``kept`` or still being read to: all of them or none.

        Returns them and how many experts had to leave. Raises :class:`BudgetError` if the pool cannot hold the keys.
        """
        tables = self._tables
        slots = self._prepared(len(keys), kept)
        if slots is None:
            slots = self._choose(keys, kept, now)
        gone = tables.owner[slots]
        gone = gone[gone != NONE]
        tables.slot_of[gone] = NONE
        tables.reserved_slot[gone] = NONE
        tables.owner[slots] = keys
        tables.reserved_slot[keys] = slots
        return slots, len(gone)

    def prepare(self, taken: Keys, now: int) -> None:
        """Choose the next slots anew: the experts ``taken`` have got slots, by whomever."""
        policy, tables = self._policy, self._tables
        if not policy.is_ranking:
            return
        policy.coming(taken, tables.freq, tables.last_use, now)
        free = self._free()
        n_free, n = len(free), min(N_NEXT, self.n_slots)
        self._next_slots[:n_free] = free[:n]
        if n_free < n:
            held = self._slots[self._owner != NONE] if n_free else self._slots
            ranked = policy.victims(tables.owner.take(held), n - n_free, tables.freq, tables.last_use, now)
            self._next_slots[n_free:n] = held[ranked]

    def _prepared(self, n: int, kept: Int32s) -> Slots | None:
        """The first n of the next slots that can go: free ones, and those of experts that are there and not kept."""
        slot_of, owner, in_use = self._tables.slot_of, self._tables.owner, set(kept.tolist())
        chosen: list[int] = []
        for slot in self._next_slots.tolist():
            if slot == NONE or len(chosen) == n:
                break
            key = owner[slot]
            if key == NONE or (slot not in in_use and slot_of[key] == slot):
                chosen.append(slot)
        return np.array(chosen, np.intp) if len(chosen) == n else None

    def _choose(self, keys: Keys, kept: Int32s, now: int) -> Slots:
        """Free ones first, then the policy's victims."""
        policy, tables = self._policy, self._tables
        policy.coming(keys, tables.freq, tables.last_use, now)
        slots = self._free()[: len(keys)]
        n = len(keys) - len(slots)
        if n > 0:
            candidates = self._evictable(kept)
            if len(candidates) < n:
                raise BudgetError(
                    f"{n} more slots are needed, but only {len(candidates)} of {self.n_slots} can be given up: "
                    "raise expert_cache"
                )
            chosen = policy.victims(tables.owner.take(candidates), n, tables.freq, tables.last_use, now)
            slots = np.concatenate((slots, candidates[chosen]))
        return slots

    def _free(self) -> Slots:
        """Those that hold nothing."""
        free: Slots = self._slots[self._owner == NONE]
        return free

    def _evictable(self, kept: Int32s) -> Slots:
        """Those of experts that are there, without the kept ones."""
        # a free slot's owner, -1, means the last key here, which may be anywhere but in a free slot
        may_go = self._tables.slot_of.take(self._owner) == self._slots
        may_go[kept - self._first] = False
        evictable: Slots = self._slots[may_go]
        return evictable
