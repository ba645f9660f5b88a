"""The expert cache without its reads: the slots, policies and order of :mod:`..placement.cache`, so that a policy sees
what it saw in the run, down to ties. What is fetched is there at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..placement.slots import N_NEXT, NONE, PoolSlots, Tables
from ..policy.base import Keys, Policy
from ..policy.pool import Pool
from ..trace.trace import Trace


@dataclass
class Counts:
    """As in ExpertStats; ``decode_*``: of acquires for one token."""

    acquires: int = 0
    hits: int = 0
    host_hits: int = 0  # of these, in host memory
    misses: int = 0
    evictions: int = 0
    decode_hits: int = 0
    decode_misses: int = 0

    @property
    def hit_rate(self) -> float:
        wanted = self.hits + self.misses
        return self.hits / wanted if wanted else 0.0

    @property
    def decode_hit_rate(self) -> float:
        wanted = self.decode_hits + self.decode_misses
        return self.decode_hits / wanted if wanted else 0.0


class ReplayCache(Tables):
    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.n_keys)
        self.slot_of = self.reserved_slot
        self.counts = Counts()
        self.pool_of_layer: dict[int, PoolSlots] = {}
        self._layers = trace.layers

    def load(self, pools: Sequence[Pool], policy: Policy) -> None:
        for pool in pools:
            made = PoolSlots(pool, policy, self, np.full(N_NEXT, NONE, np.int32))
            self.pool_of_layer.update(dict.fromkeys(pool.layers, made))

    def unload(self, used: Keys) -> None:
        """All slots are empty. ``used``: the keys that had to do with the cache."""
        held = self.reserved_slot[used]
        self.owner[held[held != NONE]] = NONE
        self.reserved_slot[used] = NONE
        self.freq[used] = self.last_use[used] = 0

    def count(self, keys: Keys, now: int) -> NDArray[np.bool_]:
        """What native does at an acquire; which keys are there."""
        self.freq[keys] += 1
        self.last_use[keys] = now
        there: NDArray[np.bool_] = self.reserved_slot.take(keys) != NONE
        n_hits = int(np.count_nonzero(there))
        self.counts.acquires += 1
        self.counts.hits += n_hits
        self.counts.misses += len(keys) - n_hits
        return there

    def fetch(self, layer: int, missing: Keys, kept: NDArray[np.int32], now: int) -> None:
        """Give each of missing a slot, not one of ``kept``."""
        pool = self.pool_of_layer[layer]
        self.counts.evictions += pool.take(missing, kept, now)[1]
        pool.prepare(missing, now)

    def fetch_in_passes(self, layer: int, missing: Keys, hits: Keys, now: int) -> None:
        """As many as fit beside those that are there, then the rest in full passes."""
        n_slots = self.pool_of_layer[layer].n_slots
        n = n_slots - len(hits)
        if n > 0:
            self.fetch(layer, missing[:n], self.reserved_slot[hits], now)
        for i in range(n, len(missing), n_slots):
            self.fetch(layer, missing[i : i + n_slots], self.reserved_slot[:0], now)

    def fetch_ahead(self, layer: int, wanted: Keys, kept: NDArray[np.int32], now: int) -> None:
        """The slots are chosen for the keys in rising order; each gets one of them as recorded."""
        pool = self.pool_of_layer[layer]
        slots, n_evicted = pool.take(np.sort(wanted), kept, now)
        self.counts.evictions += n_evicted
        self.owner[slots] = wanted
        self.reserved_slot[wanted] = slots
        pool.prepare(wanted, now)

    def kept_beside(self, layer: int, other: int) -> NDArray[np.int32]:
        """Slots of two layers' experts, in the pool of the first."""
        layers = {layer, other} if self.pool_of_layer.get(other) is self.pool_of_layer[layer] else {layer}
        found = [
            self.reserved_slot[described.first_key : described.first_key + described.n_expert]
            for described in (self._layers[index] for index in sorted(layers))
        ]
        kept = np.concatenate(found)
        held: NDArray[np.int32] = kept[kept != NONE]
        return held

    def read_failed(self, key: int) -> None:
        self.owner[self.reserved_slot[key]] = NONE
        self.reserved_slot[key] = NONE
