"""The live cache: its tables are shared with native code, which asks here what it cannot decide by itself.

Life of a slot:  free --fetch--> loading --native publishes it--> resident --fetch (as a victim)--> loading ...
                                 loading --rollback--> free

A slot without owner is free; one that ``slot_of`` names for its owner is resident; any other is loading: native sets
``slot_of`` when a read has ended well.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..format.layout import Layer
from ..policy.base import Policy
from ..stats.counters import Counter, Counters
from .budget import PoolPlan
from .slots import N_NEXT, NONE, PoolSlots, Tables
from .tiers import Tiers


class ExpertCache(Tables):
    """Slots of any number of arenas under one numbering, for the experts of ``layers``.

    Thread-safe: ``choose_slots`` and ``prepare`` come from the computing thread, ``rollback`` from reader threads.
    """

    def __init__(self, layers: Sequence[Layer], policy: Policy, counters: Counters) -> None:
        super().__init__(sum(layer.n_expert for layer in layers))
        self.layer_slots: NDArray[np.int32] = np.zeros(len(layers), np.int32)  # [n_layers]
        self.layer_pool: NDArray[np.int32] = np.full(len(layers), NONE, np.int32)  # [n_layers]
        # [n_pools <= n_layers, N_NEXT]
        self.next_slots: NDArray[np.int32] = np.full((len(layers), N_NEXT), NONE, np.int32)
        self.tiers = Tiers(len(self.freq), len(layers))
        self.n_slots = 0
        self._layers = tuple(layers)
        self._policy = policy
        self._counters = counters
        self._pools: list[PoolSlots] = []
        self._rolled_back: dict[int, int] = {}  # key -> the slot that it had
        self._lock = threading.Lock()

    @property
    def n_pools(self) -> int:
        """Of all arenas so far."""
        return len(self._pools)

    def add_arena(self, plan: PoolPlan) -> int:
        """Add a device's slots and set ``layer_slots`` of its layers; returns the number of the first slot.

        Raises ValueError if a layer already has a pool, or its blocks are not as large as the pool's.
        """
        with self._lock:
            for pool in plan.pools:
                for layer in pool.layers:
                    if self.layer_pool[layer] != NONE or self._layers[layer].block_bytes != pool.block_bytes:
                        raise ValueError(
                            f"layer {layer} does not belong to a new pool of {pool.block_bytes}-byte slots"
                        )
            first = self.n_slots
            for pool in plan.pools:
                pool = replace(pool, first_slot=first + pool.first_slot)
                index = len(self._pools)
                self.layer_pool[list(pool.layers)] = index
                self.layer_slots[list(pool.layers)] = pool.n_slots
                self._pools.append(PoolSlots(pool, self._policy, self, self.next_slots[index]))
                if pool.n_host:
                    self.tiers.add(index, pool)
            self.n_slots += plan.n_slots
            return first

    def choose_slots(
        self, layer: int, missing: Sequence[int], active: Sequence[int], kept_layer: int = NONE
    ) -> list[int]:
        """Take a slot for each expert of ``missing``, in order; all of them or none. They are loading now.

        ``missing``, ``active``: expert numbers of the layer; arrays are fine. Experts of ``active``, all of the layer
        ``kept_layer``, and slots still loading are never evicted. Raises ValueError if an expert is out of range, repeated, or
        has a slot already; :class:`BudgetError` if the pool cannot hold them.
        """
        with self._lock:
            keys = self._keys(layer, missing)
            kept = self.reserved_slot[self._keys(layer, active)]
            if kept_layer != NONE and self.layer_pool[kept_layer] == self.layer_pool[layer]:
                other = self._layers[kept_layer]
                of_other = self.reserved_slot[other.first_key : other.first_key + other.n_expert]
                kept = np.concatenate((kept, of_other))
            if len(set(keys.tolist())) != len(keys) or (self.reserved_slot[keys] != NONE).any():
                raise ValueError(f"experts {list(missing)} of layer {layer} are repeated, or have a slot already")
            if self.layer_pool[layer] == NONE:
                raise ValueError(f"layer {layer} has no slots: its arena was not added")
            slots, n_evicted = self._pools[self.layer_pool[layer]].take(keys, kept[kept != NONE], self._now())
            self._counters.add(Counter.EVICTIONS, n_evicted)
            taken: list[int] = slots.tolist()
            return taken

    def prepare(self, layer: int, fetched: Sequence[int]) -> None:
        """Choose ``next_slots`` of the layer's pool anew: ``fetched`` have got slots, by whomever.

        The choice is as if none of their reads had failed yet: a replay doesn't know which did so before it.
        """
        with self._lock:
            keys = self._keys(layer, fetched)
            failed = self._failed_already(keys)
            slots = list(failed.values())
            self.owner[slots] = list(failed)
            try:
                self._pools[self.layer_pool[layer]].prepare(keys, self._now())
            finally:
                self.owner[slots] = NONE

    def _failed_already(self, keys: NDArray[np.intp]) -> dict[int, int]:
        """Of keys that got slots, those whose read has failed, and the slot that each had."""
        lost = [key for key in keys.tolist() if self.reserved_slot[key] == NONE]
        slots = {key: self._rolled_back.get(key, NONE) for key in lost}
        return {key: slot for key, slot in slots.items() if slot != NONE and self.owner[slot] == NONE}

    def withdraw(self, slots: Sequence[int]) -> None:
        """These slots, which are free, can't be used: they are no part of their pools any more."""
        gone = np.asarray(slots, np.intp)
        with self._lock:
            for index, pool in enumerate(self._pools):
                pool.withdraw(gone)
                self.layer_slots[self.layer_pool == index] = pool.n_slots

    def rollback(self, slot: int) -> None:
        """The slot could not be filled: it is free, its expert is nowhere. Raises ValueError if it is not being loaded."""
        with self._lock:
            key = self.owner[slot] if 0 <= slot < self.n_slots else NONE
            if key == NONE or self.slot_of[key] == slot:
                raise ValueError(f"slot {slot} is not being loaded")
            self.reserved_slot[key] = NONE
            self._rolled_back[int(key)] = slot
            self.owner[slot] = NONE  # the last one: native may take it now

    def _now(self) -> int:
        return int(self._counters.array[Counter.ACQUIRES])

    def _keys(self, layer: int, experts: Sequence[int]) -> NDArray[np.intp]:
        numbers = np.asarray(experts).tolist()
        described = self._layers[layer]
        if numbers and (min(numbers) < 0 or max(numbers) >= described.n_expert):
            raise ValueError(f"layer {layer} has experts 0..{described.n_expert - 1}, not {list(experts)}")
        return np.array(numbers, np.intp) + described.first_key
