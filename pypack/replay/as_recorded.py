"""The run again, with its own passes and failed reads: the same policy gives the live counters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import ExpertPackError, TraceError
from ..placement.slots import NONE
from ..policy import make_policy
from ..policy.base import Policy
from ..policy.pool import Pool
from ..trace.format import Kind
from ..trace.trace import Trace
from .cache import Counts, ReplayCache
from .policies import REPLAY_POLICIES


def check_live(trace: Trace) -> str:
    """Whether the replay of the run as it was gives its counters; one line."""
    if trace.end is None or trace.policy not in REPLAY_POLICIES:
        return "no live counters to compare with"
    counts = replay_as_recorded(trace, make_policy(trace.policy, REPLAY_POLICIES))
    found = (counts.acquires, counts.hits, counts.misses, counts.evictions)
    if found != trace.end[:4]:
        raise ExpertPackError(
            f"{trace.path}: the replay with {trace.policy} counts {found}, the run counted {tuple(trace.end[:4])} "
            "(acquires, hits, misses, evictions): trace and package are of different versions"
        )
    return f"the replay with {trace.policy} gives the run's counters: {counts.hits} hits, {counts.misses} misses, {counts.evictions} evictions"


def replay_as_recorded(trace: Trace, policy: Policy, pools: Sequence[Pool] | None = None) -> Counts:
    """``pools``: those of the run, if the trace does not say.

    Raises :class:`TraceError` if the replay has other experts in its cache than a record says.
    """
    cache = ReplayCache(trace)
    keys = trace.keys().astype(np.intp, copy=False)
    starts = trace.session_starts()
    for first, last in zip(starts, [*starts[1:], len(trace.kind)], strict=True):
        cache.load(trace.recorded_pools(first, last) if pools is None else pools, policy)
        _replay_session(trace, cache, keys, first, last)
        used = keys[trace.start[first] : trace.start[last]]
        cache.unload(used[used < trace.n_keys])  # numbers of arenas are among them
    return cache.counts


def _replay_session(trace: Trace, cache: ReplayCache, keys: NDArray[np.intp], first: int, last: int) -> None:
    now = 0
    ahead: dict[int, NDArray[np.intp]] = {}  # the last layer's that was read ahead: its keys, missing at its acquire
    failed_early: list[int] = []  # keys whose reads ended before their fetch was recorded
    for i in range(first, last):
        kind, number, layer = trace.kind[i], int(trace.number[i]), int(trace.layer[i])
        wanted = keys[trace.start[i] : trace.start[i + 1]]
        if kind == Kind.ACQUIRE:
            now += 1
            there = cache.count(wanted, now)
            missing = wanted[~there]
            n_ahead = int(np.count_nonzero(np.isin(wanted[there], ahead.pop(layer, wanted[:0]))))
            cache.counts.hits -= n_ahead
            cache.counts.misses += n_ahead
            if len(wanted) <= cache.pool_of_layer[layer].n_slots and len(missing):
                cache.fetch(layer, missing, cache.reserved_slot[wanted[there]], now)
        elif kind == Kind.FETCH:
            kept = cache.reserved_slot[wanted[number:]]
            if (cache.reserved_slot[wanted[:number]] != NONE).any() or (kept == NONE).any():
                raise _contradiction(trace, i)
            cache.fetch(layer, wanted[:number], kept, now)
            for key in failed_early:
                if cache.reserved_slot[key] == NONE:
                    raise _contradiction(trace, i)
                cache.read_failed(key)
            failed_early.clear()
        elif kind == Kind.AHEAD:
            if (cache.reserved_slot[wanted] != NONE).any():
                raise _contradiction(trace, i)
            cache.fetch_ahead(layer, wanted, cache.kept_beside(layer, number), now)
            ahead = {layer: wanted}
        elif kind == Kind.READ_FAILED and cache.reserved_slot[wanted[0]] == NONE:
            failed_early.append(int(wanted[0]))
        elif kind == Kind.READ_FAILED:
            cache.read_failed(int(wanted[0]))


def _contradiction(trace: Trace, i: int) -> TraceError:
    return TraceError(
        f"{trace.path}: in the replay other experts are in the cache than record {i} says: the trace is damaged, or was "
        "recorded by another version: record it again"
    )
