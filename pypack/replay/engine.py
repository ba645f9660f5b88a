"""The acquires of a trace with other pools or another policy, as fast as numpy allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import ExpertPackError
from ..placement.slots import NONE
from ..policy.base import Keys, Policy
from ..policy.pool import Pool
from ..trace.trace import Trace
from .belady import Belady, BeladyBypass, BypassCache, future_of
from .cache import Counts, ReplayCache
from .tiers import ReplayTiers

_MAX_RUN = 1024  # acquires looked at together while nothing is missing


class Acquires:
    """What all replays of a trace read: made once, the processes share it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace = trace.only_acquires()
        self.keys = trace.keys().astype(np.intp, copy=False)  # [n_lookups]
        self.future = future_of(trace.start, self.keys)  # [n_lookups]
        decode_sizes = np.where(trace.number <= trace.top_k, np.diff(trace.start), 0)
        new_graph = np.flatnonzero(np.diff(trace.step, append=-1)) + 1
        sizes = np.diff(new_graph, prepend=0)
        self.graph_end = np.repeat(new_graph, sizes)  # [n_acquires] index behind the last acquire of its graph
        self.n_decode = np.concatenate((np.zeros(1, np.int64), np.cumsum(decode_sizes)))  # [n_acquires + 1]


def replay(acquires: Acquires, pools: Sequence[Pool], policy: Policy) -> Counts:
    """Raises :class:`ExpertPackError` if there is not enough memory."""
    trace = acquires.trace
    try:
        run = _Run(acquires, pools, policy)
        run.all()
        return run.counts
    except MemoryError:
        raise ExpertPackError(
            f"{trace.path}: there is not enough memory to replay {trace.n_keys} experts in {len(pools)} pools: free some"
        ) from None


class _Run:
    """The acquires handed to the cache one miss or several hits at a time."""

    def __init__(self, acquires: Acquires, pools: Sequence[Pool], policy: Policy) -> None:
        self._acquires = acquires
        self._start = acquires.trace.start
        self._cache = (BypassCache if isinstance(policy, BeladyBypass) else ReplayCache)(acquires.trace)
        self._belady = policy if isinstance(policy, Belady) else None
        if self._belady is not None:
            self._belady.next_use = np.zeros(acquires.trace.n_keys, np.int64)
        self._cache.load(pools, policy)
        self.counts = self._cache.counts
        self._tiers: ReplayTiers | None = None
        if any(pool.n_host for pool in pools) and not isinstance(policy, BeladyBypass):  # whose slots have no places
            self._tiers = ReplayTiers(self._cache, pools, len(acquires.trace.layers))

    def all(self) -> None:
        n_events, i, n_together = len(self._start) - 1, 0, 1
        graph_end = n_events if self._tiers is None else 0
        while i < n_events:
            if self._tiers is not None and i == graph_end:
                self._tiers.begin_graph(i, self.counts.host_hits)
                graph_end = int(self._acquires.graph_end[i])
            end = self._first_miss(i, min(i + n_together, graph_end))
            if end > i:
                self._hit(i, end)
                n_together = min(2 * n_together, _MAX_RUN)
                i = end
            else:
                self._miss(i)
                n_together = 1
                i += 1

    def _first_miss(self, first: int, last: int) -> int:
        """The first acquire of first .. last - 1 that misses something, or last."""
        start = self._start[first]
        there = self._cache.reserved_slot.take(self._acquires.keys[start : self._start[last]]) != NONE
        n_there = int(there.argmin())
        if there[n_there]:
            return last
        if last - first == 1:
            return first
        return int(np.searchsorted(self._start[first : last + 1], start + n_there, "right")) - 1 + first

    def _hit(self, first: int, last: int) -> None:
        """Acquires first .. last - 1 miss nothing."""
        cache, lookups = self._cache, slice(self._start[first], self._start[last])
        keys = self._acquires.keys[lookups]
        if last - first == 1:
            cache.freq[keys] += 1
            cache.last_use[keys] = last
        else:
            np.add.at(cache.freq, keys, 1)
            sizes = np.diff(self._start[first : last + 1])
            cache.last_use[keys] = np.repeat(np.arange(first + 1, last + 1), sizes)  # of equal keys, the last counts
        self._look_ahead(lookups)
        self.counts.acquires += last - first
        self.counts.hits += len(keys)
        self._note_host_hits(keys)
        self.counts.decode_hits += int(self._acquires.n_decode[last] - self._acquires.n_decode[first])

    def _miss(self, i: int) -> None:
        """Acquire i misses something."""
        cache, lookups = self._cache, slice(self._start[i], self._start[i + 1])
        keys = self._acquires.keys[lookups]
        self._look_ahead(lookups)
        there = cache.count(keys, i + 1)
        missing, hits = keys[~there], keys[there]
        self._note_host_hits(hits)
        if self._acquires.n_decode[i + 1] > self._acquires.n_decode[i]:
            self.counts.decode_hits += len(hits)
            self.counts.decode_misses += len(missing)
        cache.fetch_in_passes(int(self._acquires.trace.layer[i]), missing, hits, i + 1)

    def _note_host_hits(self, hits: Keys) -> None:
        if self._tiers is not None:
            self.counts.host_hits += int(np.count_nonzero(self._tiers.in_host(hits)))

    def _look_ahead(self, lookups: slice) -> None:
        if self._belady is not None:
            self._belady.next_use[self._acquires.keys[lookups]] = self._acquires.future[lookups]
