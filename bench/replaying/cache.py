"""The expert cache without its reads: the same slots, policies and order as llama_expert_pack.pypack.placement.cache, as fast as numpy allows.

Slots are taken from those that were chosen at the pool's fetch before, while enough of them can go; else free ones
from the first one up, then the policy's victims. Each goes to the next missing expert in order. Candidates are listed
by slot. So a policy sees what it saw in the run, down to ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.replaying.belady import Belady, future_of
from llama_expert_pack.pypack.errors import TraceError
from llama_expert_pack.pypack.placement.cache import N_NEXT
from llama_expert_pack.pypack.policy.base import Policy
from llama_expert_pack.pypack.policy.pool import Pool
from llama_expert_pack.pypack.trace.format import Kind
from llama_expert_pack.pypack.trace.trace import Trace

__all__ = ["Counts", "replay", "replay_as_recorded"]

_MAX_RUN = 1024  # acquires looked at together while nothing is missing


@dataclass
class Counts:
    """As in ExpertStats; ``decode_*``: of acquires for one token."""

    acquires: int = 0
    hits: int = 0
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


class _Pool:
    """Slots of one size, numbered from 0, and their policy."""

    def __init__(self, pool: Pool, policy: Policy) -> None:
        self.n_slots = pool.n_slots
        self.policy = policy
        self.owner: NDArray[np.intp] = np.full(pool.n_slots, -1, np.intp)
        self.n_free = pool.n_slots
        self.next_slots = list(range(min(N_NEXT, pool.n_slots))) if policy.is_ranking else []

    def take_next(self, n: int, kept_slots: NDArray[np.intp]) -> NDArray[np.intp] | None:
        """The first n of the next slots that are not kept, or None."""
        kept = set(kept_slots.tolist())
        chosen = [slot for slot in self.next_slots if slot not in kept][:n]
        return np.array(chosen, np.intp) if len(chosen) == n else None

    def free_slots(self, n: int) -> NDArray[np.intp]:
        """The first n free ones, at most."""
        return np.flatnonzero(self.owner < 0)[:n] if self.n_free else np.empty(0, np.intp)


class _Cache:
    def __init__(self, trace: Trace) -> None:
        self.freq = np.zeros(trace.n_keys, np.int64)
        self.last_use = np.zeros(trace.n_keys, np.int64)
        self.place = np.full(trace.n_keys, -1, np.intp)
        self.counts = Counts()
        self.pool_of_layer: list[_Pool] = [None] * len(trace.layers)  # type: ignore[list-item]

    def load(self, pools: Sequence[Pool], policy: Policy, used: NDArray[np.intp] | None = None) -> None:
        """All slots are empty. ``used``: the keys that had to do with the cache before."""
        if used is not None:
            used = used[used < len(self.place)]  # numbers of arenas are among them
            self.freq[used] = self.last_use[used] = 0
            self.place[used] = -1
        for pool in pools:
            made = _Pool(pool, policy.for_pool(pool, len(self.freq)))
            for layer in pool.layers:
                self.pool_of_layer[layer] = made

    def fetch(self, pool: _Pool, missing: NDArray[np.intp], kept_slots: NDArray[np.intp], now: int) -> None:
        """Give each of missing a slot, not one of kept_slots."""
        slots = pool.take_next(len(missing), kept_slots)
        if slots is None:
            slots = self._choose(pool, missing, kept_slots, now)
        gone = pool.owner[slots]
        gone = gone[gone >= 0]
        self.place[gone] = -1
        self.counts.evictions += len(gone)
        pool.n_free -= len(missing) - len(gone)
        pool.owner[slots] = missing
        self.place[missing] = slots
        if pool.policy.is_ranking:
            self._prepare(pool, missing, now)

    def _choose(
        self, pool: _Pool, missing: NDArray[np.intp], kept_slots: NDArray[np.intp], now: int
    ) -> NDArray[np.intp]:
        slots = pool.free_slots(len(missing))
        pool.policy.coming(missing, self.freq, self.last_use, now)
        n_victims = len(missing) - len(slots)
        if n_victims > 0:
            may_go = pool.owner >= 0
            may_go[kept_slots] = False
            candidates = np.flatnonzero(may_go)
            chosen = pool.policy.victims(pool.owner.take(candidates), n_victims, self.freq, self.last_use, now)
            slots = np.concatenate((slots, candidates[chosen]))
        return slots

    def _prepare(self, pool: _Pool, fetched: NDArray[np.intp], now: int) -> None:
        pool.policy.coming(fetched, self.freq, self.last_use, now)
        slots = pool.free_slots(N_NEXT)
        n = min(N_NEXT, pool.n_slots) - len(slots)
        if n > 0:
            taken = np.flatnonzero(pool.owner >= 0) if pool.n_free else np.arange(pool.n_slots)
            owner = pool.owner.take(taken) if pool.n_free else pool.owner
            ranked = pool.policy.victims(owner, min(n, len(taken)), self.freq, self.last_use, now)
            slots = np.concatenate((slots, taken[ranked]))
        pool.next_slots = slots.tolist()

    def fetch_in_passes(self, pool: _Pool, missing: NDArray[np.intp], hits: NDArray[np.intp], now: int) -> None:
        """More experts than slots: as many as fit beside those that are there, then the rest in full passes."""
        n = pool.n_slots - len(hits)
        if n > 0:
            self.fetch(pool, missing[:n], self.place[hits], now)
        for i in range(n, len(missing), pool.n_slots):
            part = missing[i : i + pool.n_slots]
            self.fetch(pool, part, np.empty(0, np.intp), now)

    def read_failed(self, pool: _Pool, key: int) -> None:
        slot = int(self.place[key])
        pool.owner[slot] = self.place[key] = -1
        pool.n_free += 1

    def count(self, keys: NDArray[np.intp], now: int) -> NDArray[np.bool_]:
        """What native does at an acquire; which keys are there."""
        self.freq[keys] += 1
        self.last_use[keys] = now
        there: NDArray[np.bool_] = self.place.take(keys) >= 0
        n_hits = int(np.count_nonzero(there))
        self.counts.acquires += 1
        self.counts.hits += n_hits
        self.counts.misses += len(keys) - n_hits
        return there


def replay_as_recorded(trace: Trace, policy: Policy, pools: Sequence[Pool] | None = None) -> Counts:
    """The run again, with its own passes and failed reads: gives the live counters if the policy is the same.

    ``pools``: those of the run. Raises :class:`TraceError` if the replay has other experts in its cache than a record says.
    """
    cache = _Cache(trace)
    keys = trace.keys().astype(np.intp)
    starts = trace.session_starts()
    used = keys[:0]
    for first, last in zip(starts, [*starts[1:], len(trace.kind)], strict=True):
        cache.load(trace.recorded_pools(first, last) if pools is None else pools, policy, used)
        _replay_session(trace, cache, keys, first, last)
        used = keys[trace.start[first] : trace.start[last]]
    return cache.counts


def _replay_session(trace: Trace, cache: _Cache, keys: NDArray[np.intp], first: int, last: int) -> None:
    now = 0
    failed_early: list[tuple[_Pool, int]] = []  # reads that ended before their fetch was recorded
    for i in range(first, last):
        kind, number = trace.kind[i], int(trace.number[i])
        if kind == Kind.SLOTS:
            continue
        pool, wanted = cache.pool_of_layer[trace.layer[i]], keys[trace.start[i] : trace.start[i + 1]]
        if kind == Kind.ACQUIRE:
            now += 1
            there = cache.count(wanted, now)
            missing = wanted[~there]
            if len(wanted) <= pool.n_slots and len(missing):
                cache.fetch(pool, missing, cache.place[wanted[there]], now)
        elif kind == Kind.FETCH:
            kept = cache.place[wanted[number:]]
            if (cache.place[wanted[:number]] >= 0).any() or (kept < 0).any():
                raise _contradiction(trace, i)
            cache.fetch(pool, wanted[:number], kept, now)
            for owner, key in failed_early:
                if cache.place[key] < 0:
                    raise _contradiction(trace, i)
                cache.read_failed(owner, key)
            failed_early.clear()
        elif kind == Kind.READ_FAILED and cache.place[wanted[0]] < 0:
            failed_early.append((pool, int(wanted[0])))
        elif kind == Kind.READ_FAILED:
            cache.read_failed(pool, int(wanted[0]))


def _contradiction(trace: Trace, i: int) -> TraceError:
    return TraceError(
        f"{trace.path}: in the replay other experts are in the cache than record {i} says: the trace is damaged, or was "
        "recorded by another version: record it again"
    )


def replay(
    trace: Trace, pools: Sequence[Pool], policy: Policy, progress: Callable[[int], None] = lambda _: None
) -> Counts:
    """The acquires of the trace with other pools or another policy. ``progress``: gets the number of acquires done."""
    trace = trace.only_acquires()
    cache = _Cache(trace)
    cache.load(pools, policy)
    run = _Run(trace, cache, policy)
    n_events, i, n_together = len(trace.layer), 0, 1
    while i < n_events:
        end = run.first_miss(i, min(i + n_together, n_events))
        if end > i:
            run.hit(i, end)
            n_together = min(2 * n_together, _MAX_RUN)
            i = end
        else:
            run.miss(i)
            n_together = 1
            i += 1
        if not i & 0xFFF:
            progress(i)
    return run.cache.counts


class _Run:
    """The acquires of a trace, handed to the cache one miss or several hits at a time."""

    def __init__(self, trace: Trace, cache: _Cache, policy: Policy) -> None:
        self.cache = cache
        self._keys = trace.keys().astype(np.intp)
        self._start = trace.start
        self._starts: list[int] = trace.start.tolist()
        self._layers: list[int] = trace.layer.tolist()
        decode_sizes = np.where(trace.number <= trace.top_k, np.diff(trace.start), 0)
        self._n_decode = np.concatenate((np.zeros(1, np.int64), np.cumsum(decode_sizes))).tolist()
        self._next_use = self._future = None
        if isinstance(policy, Belady):
            self._next_use, self._future = policy.next_use, future_of(trace.start, self._keys)

    def first_miss(self, first: int, last: int) -> int:
        """The first acquire of first .. last - 1 that misses something, or last."""
        start = self._starts[first]
        there = self.cache.place.take(self._keys[start : self._starts[last]]) >= 0
        n_there = int(there.argmin())
        if there[n_there]:
            return last
        if last - first == 1:
            return first
        return int(np.searchsorted(self._start[first : last + 1], start + n_there, "right")) - 1 + first

    def hit(self, first: int, last: int) -> None:
        """Acquires first .. last - 1 miss nothing."""
        cache, start, end = self.cache, self._starts[first], self._starts[last]
        keys = self._keys[start:end]
        if last - first == 1:
            cache.freq[keys] += 1
            cache.last_use[keys] = first + 1
        else:
            np.add.at(cache.freq, keys, 1)
            sizes = np.diff(self._start[first : last + 1])
            cache.last_use[keys] = np.repeat(np.arange(first + 1, last + 1), sizes)  # of equal keys, the last counts
        if self._next_use is not None and self._future is not None:
            self._next_use[keys] = self._future[start:end]
        cache.counts.acquires += last - first
        cache.counts.hits += end - start
        cache.counts.decode_hits += self._n_decode[last] - self._n_decode[first]

    def miss(self, i: int) -> None:
        """Acquire i misses something."""
        cache, start, end = self.cache, self._starts[i], self._starts[i + 1]
        keys, pool = self._keys[start:end], cache.pool_of_layer[self._layers[i]]
        if self._next_use is not None and self._future is not None:
            self._next_use[keys] = self._future[start:end]
        there = cache.count(keys, i + 1)
        missing, hits = keys[~there], keys[there]
        if self._n_decode[i + 1] > self._n_decode[i]:
            cache.counts.decode_hits += len(hits)
            cache.counts.decode_misses += len(missing)
        if len(keys) <= pool.n_slots:
            cache.fetch(pool, missing, cache.place[hits], i + 1)
        else:
            cache.fetch_in_passes(pool, missing, hits, i + 1)
