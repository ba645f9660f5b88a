"""The cache's books: which expert is in which slot, and which slots a fetch takes.

Life of a slot:  free --fetch--> loading --native publishes it--> resident --fetch (as a victim)--> loading ...
                                 loading --rollback--> free

A slot without owner is free; one that ``slot_of`` names for its owner is resident; any other is loading.
All tables are shared with native code (``expert_tables`` of the provider header). ``slot_of``: native publishes an
expert when its read has ended well. ``reserved_slot``: where an expert is *or is being read to*. ``next_slots``: slots that
may be taken next, the first one first; native takes them by itself while enough of them can go, and only else asks
for :meth:`~ExpertCache.choose_slots`. They are chosen by :meth:`~ExpertCache.prepare`, at the fetch before.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pypack.budget import Pool, PoolPlan
from pypack.counters import Counter, Counters
from pypack.errors import BudgetError
from pypack.layout import Layer
from pypack.policy import Policy

__all__ = ["ExpertCache"]

N_NEXT = 64  # EXPERT_NEXT_SLOTS: enough for the experts of a few tokens beside those in use
_NONE = -1


class ExpertCache:
    """Slots of any number of arenas under one numbering, for the experts of ``layers``.

    Thread-safe: ``choose_slots`` and ``prepare`` come from the computing thread, ``rollback`` from reader threads.
    """

    def __init__(self, layers: Sequence[Layer], policy: Policy, counters: Counters) -> None:
        n_keys = sum(layer.n_expert for layer in layers)
        self.slot_of: NDArray[np.int32] = np.full(n_keys, _NONE, np.int32)  # [n_keys] shared
        self.freq: NDArray[np.int64] = np.zeros(n_keys, np.int64)  # [n_keys] shared
        self.last_use: NDArray[np.int64] = np.zeros(n_keys, np.int64)  # [n_keys] shared
        self.layer_slots: NDArray[np.int32] = np.zeros(len(layers), np.int32)  # [n_layers] shared
        self.reserved_slot: NDArray[np.int32] = np.full(n_keys, _NONE, np.int32)  # [n_keys] shared
        self.owner: NDArray[np.int64] = np.full(n_keys, _NONE, np.int64)  # [n_slots <= n_keys] shared; key, or -1
        self.layer_pool: NDArray[np.int32] = np.full(len(layers), _NONE, np.int32)  # [n_layers] shared
        # [n_pools <= n_layers, N_NEXT] shared
        self.next_slots: NDArray[np.int32] = np.full((len(layers), N_NEXT), _NONE, np.int32)
        self.n_slots = 0
        self._layers = tuple(layers)
        self._policy = policy
        self._counters = counters
        self._pools: list[Pool] = []
        self._policies: list[Policy] = []  # [n_pools]
        self._lock = threading.Lock()

    def add_arena(self, plan: PoolPlan) -> int:
        """Add a device's slots and set ``layer_slots`` of its layers; returns the number of the first slot.

        Raises ValueError if a layer already has a pool, or its blocks are not as large as the pool's.
        """
        with self._lock:
            for pool in plan.pools:
                for layer in pool.layers:
                    if self.layer_pool[layer] != _NONE or self._layers[layer].block_bytes != pool.block_bytes:
                        raise ValueError(
                            f"layer {layer} does not belong to a new pool of {pool.block_bytes}-byte slots"
                        )
            first = self.n_slots
            for pool in plan.pools:
                pool = replace(pool, first_slot=first + pool.first_slot)
                for layer in pool.layers:
                    self.layer_pool[layer] = len(self._pools)
                    self.layer_slots[layer] = pool.n_slots
                self._pools.append(pool)
                self._policies.append(self._policy.for_pool(pool, len(self.freq)))
                self._prepare(len(self._pools) - 1)
            self.n_slots += plan.n_slots
            return first

    def choose_slots(self, layer: int, missing: Sequence[int], active: Sequence[int]) -> list[int]:
        """Take a slot for each expert of ``missing``, in order; all of them or none. They are loading now.

        ``missing``, ``active``: expert numbers of the layer; arrays are fine. Free slots go first, then what
        the policy evicts; experts of ``active`` and slots still loading are never evicted.
        Raises ValueError if an expert is out of range, repeated, or has a slot already; :class:`BudgetError`
        if the pool cannot hold them.
        """
        with self._lock:
            keys = self._keys(layer, missing)
            kept = self.reserved_slot[self._keys(layer, active)]
            if len(set(keys.tolist())) != len(keys) or (self.reserved_slot[keys] != _NONE).any():
                raise ValueError(f"experts {list(missing)} of layer {layer} are repeated, or have a slot already")
            pool_index = int(self.layer_pool[layer])
            if pool_index == _NONE:
                raise ValueError(f"layer {layer} has no slots: its arena was not added")
            slots = self._free(pool_index, len(keys))
            now = int(self._counters.array[Counter.ACQUIRES])
            self._policies[pool_index].coming(keys.astype(np.intp), self.freq, self.last_use, now)
            if len(slots) < len(keys):
                slots += self._victims(layer, len(keys) - len(slots), kept[kept != _NONE], now)
            self.owner[slots] = keys
            self.reserved_slot[keys] = slots
            return slots

    def prepare(self, layer: int, fetched: Sequence[int]) -> None:
        """Choose ``next_slots`` of the layer's pool anew: ``fetched`` have got slots, by whomever.

        Only policies that rank look ahead; for the others every fetch asks :meth:`choose_slots`.
        """
        with self._lock:
            pool_index = int(self.layer_pool[layer])
            policy = self._policies[pool_index]
            if policy.is_ranking:
                now = int(self._counters.array[Counter.ACQUIRES])
                policy.coming(self._keys(layer, fetched).astype(np.intp), self.freq, self.last_use, now)
                self._prepare(pool_index)

    def rollback(self, slot: int) -> None:
        """The slot could not be filled: it is free, its expert is nowhere."""
        with self._lock:
            key = self.owner[slot] if 0 <= slot < self.n_slots else _NONE
            if key == _NONE or self.slot_of[key] == slot:
                raise ValueError(f"slot {slot} is not being loaded")
            self.reserved_slot[key] = _NONE
            self.owner[slot] = _NONE  # the last one: native may take it now

    def key_of(self, slot: int) -> int:
        """The expert that the slot holds or is being filled with, -1 if it is free."""
        return int(self.owner[slot])

    def check(self) -> list[str]:
        """What is inconsistent in the tables, one sentence each; empty if all is well. At rest or not."""
        with self._lock:
            return [*self._check_slots(), *self._check_keys()]

    def _keys(self, layer: int, experts: Sequence[int]) -> NDArray[np.int32]:
        numbers = np.asarray(experts).tolist()
        described = self._layers[layer]
        if numbers and (min(numbers) < 0 or max(numbers) >= described.n_expert):
            raise ValueError(f"layer {layer} has experts 0..{described.n_expert - 1}, not {list(experts)}")
        keys: NDArray[np.int32] = np.array(numbers, dtype=np.int32) + np.int32(described.first_key)
        return keys

    def _victims(self, layer: int, n: int, kept_slots: NDArray[np.int32], now: int) -> list[int]:
        """The slots to take from their experts, which are nowhere then."""
        pool_index = int(self.layer_pool[layer])
        pool = self._pools[pool_index]
        slots = self._evictable(pool, kept_slots)
        if len(slots) < n:
            raise BudgetError(
                f"layer {layer} needs {n} more slots, but only {len(slots)} of its {pool.n_slots} can be "
                "given up: raise expert_cache"
            )
        keys = self.owner.take(slots)
        chosen = self._policies[pool_index].victims(keys, n, self.freq, self.last_use, now)
        gone = keys[chosen]
        self.slot_of[gone] = _NONE
        self.reserved_slot[gone] = _NONE
        self._counters.add(Counter.EVICTIONS, n)
        victims: list[int] = slots[chosen].tolist()
        return victims

    def _evictable(self, pool: Pool, kept_slots: NDArray[np.int32]) -> NDArray[np.intp]:
        """Resident slots but the kept ones."""
        # a free slot's owner, -1, means the last key here, which may be anywhere but in a free slot
        slots = np.arange(pool.first_slot, pool.first_slot + pool.n_slots)
        may_go = self.slot_of.take(self.owner[pool.first_slot : pool.first_slot + pool.n_slots]) == slots
        may_go[kept_slots - pool.first_slot] = False
        evictable: NDArray[np.intp] = slots[may_go]
        return evictable

    def _free(self, pool_index: int, n: int) -> list[int]:
        """The first slots of the pool that hold nothing, n at most."""
        pool = self._pools[pool_index]
        owner = self.owner[pool.first_slot : pool.first_slot + pool.n_slots]
        free: list[int] = (np.flatnonzero(owner == _NONE)[:n] + pool.first_slot).tolist()
        return free

    def _prepare(self, pool_index: int) -> None:
        """Free slots, then what the policy would evict; native leaves out those that are in use by then."""
        pool, policy = self._pools[pool_index], self._policies[pool_index]
        slots = self._free(pool_index, N_NEXT)
        n = min(N_NEXT, pool.n_slots) - len(slots)
        if policy.is_ranking and n > 0:
            owner = self.owner[pool.first_slot : pool.first_slot + pool.n_slots]
            taken = np.flatnonzero(owner != _NONE)
            now = int(self._counters.array[Counter.ACQUIRES])
            ranked = policy.victims(owner.take(taken), min(n, len(taken)), self.freq, self.last_use, now)
            slots += (taken[ranked] + pool.first_slot).tolist()
        self.next_slots[pool_index] = slots + [_NONE] * (N_NEXT - len(slots)) if policy.is_ranking else _NONE

    def _check_slots(self) -> list[str]:
        wrong: list[str] = []
        for pool_index, pool in enumerate(self._pools):
            keys = {
                key: layer
                for layer in pool.layers
                for key in range(
                    self._layers[layer].first_key,
                    self._layers[layer].first_key + self._layers[layer].n_expert,
                )
            }
            for slot in range(pool.first_slot, pool.first_slot + pool.n_slots):
                key = int(self.owner[slot])
                if key != _NONE and key not in keys:
                    wrong.append(f"slot {slot} of pool {pool_index} holds key {key}, which belongs to another pool")
                elif key != _NONE and self.reserved_slot[key] != slot:
                    wrong.append(f"slot {slot} holds key {key}, for which slot {self.reserved_slot[key]} is reserved")
        return wrong

    def _check_keys(self) -> list[str]:
        wrong: list[str] = []
        for key, (reserved, published) in enumerate(
            zip(self.reserved_slot.tolist(), self.slot_of.tolist(), strict=True)
        ):
            if reserved != _NONE and not (0 <= reserved < self.n_slots and self.owner[reserved] == key):
                wrong.append(f"key {key} has slot {reserved} reserved, which it does not own")
            if published != _NONE and published != reserved:
                wrong.append(f"key {key} is published in slot {published}, but slot {reserved} is reserved for it")
        return wrong
