"""Where a replay's experts lie, on the device or in host memory: native's moves between graphs (expert_mover.cpp), whose
copies are done by the next graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..placement.slots import NONE, Tables
from ..placement.tiers import HITS_A_PLAN, Int32s, Tiers
from ..policy.base import Keys
from ..policy.pool import Pool


class ReplayTiers(Tiers):
    def __init__(self, tables: Tables, pools: Sequence[Pool], n_layers: int) -> None:
        super().__init__(len(tables.freq), len(pools))
        self._tables = tables
        self._n_layers = n_layers
        self._planned_at = 0  # number of the acquire
        self._planned_hits = 0  # in host memory, until then
        self._spares = [[pool.n_spare, 0] for pool in pools]  # blocks on the device, in host memory
        self._moves: list[list[tuple[int, int, bool]]] = [[] for _ in pools]  # under way: slot, its expert, up
        self.n_up = self.n_down = 0
        for index, pool in enumerate(pools):
            self.in_place[pool.first_slot + pool.n_device : pool.first_slot + pool.n_slots] = 1
            if pool.n_host:
                self.add(index, pool)

    def in_host(self, keys: Keys) -> NDArray[np.bool_]:
        """Which of these, which are all there, lie in host memory."""
        found: NDArray[np.bool_] = self.in_place.take(self._tables.reserved_slot.take(keys)) != 0
        return found

    def begin_graph(self, now: int, host_hits: int) -> None:
        """``now``: number of the last acquire; ``host_hits``: in host memory, so far."""
        for index in range(len(self._moves)):
            self._end(index)
            self._start(index, self.moves_down[index], up=False)
            self._start(index, self.moves_up[index], up=True)
        if now - self._planned_at >= self._n_layers and host_hits - self._planned_hits >= HITS_A_PLAN:
            self._planned_at, self._planned_hits = now, host_hits
            self.seen_freq, self.seen_owner, self.seen_in_place = self._tables.freq, self._tables.owner, self.in_place
            self.plan()

    def _end(self, index: int) -> None:
        for slot, key, up in self._moves[index]:
            same = self._tables.owner[slot] == key
            if same:
                self.in_place[slot] = not up
                self.n_up += up
                self.n_down += not up
            self._spares[index][int(up == same)] += 1
        self._moves[index].clear()

    def _start(self, index: int, slots: Int32s, *, up: bool) -> None:
        for slot in slots.tolist():
            if slot == NONE or self._spares[index][not up] == 0:
                return
            key = int(self._tables.owner[slot])
            moving = any(slot == other for other, _, _ in self._moves[index])
            if key != NONE and bool(self.in_place[slot]) == up and not moving:
                self._moves[index].append((slot, key, up))
                self._spares[index][not up] -= 1
