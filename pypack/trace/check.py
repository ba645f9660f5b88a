"""What every user of a trace relies on, checked once when it is read: records that contradict each other or the header."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import TraceError
from .format import Kind

if TYPE_CHECKING:
    from .trace import Trace

_CHUNK_IDS = 1 << 20  # looked at together
_MAX_PAIRS = 1 << 24  # of pools and experts: replays have tables with an entry for each


def check_trace(trace: Trace) -> None:
    """Raises :class:`TraceError`."""
    _check_size(trace, len({layer.block_bytes for layer in trace.layers}))
    if len(trace.kind) == 0:
        return
    if trace.layer.max() >= len(trace.layers):
        _refuse(trace, f"a record names layer {trace.layer.max()} of {len(trace.layers)}")
    sizes = np.diff(trace.start)
    if sizes.min() < 1:
        _refuse(trace, "a record has no ids")
    _check_ids(trace)
    alone = (trace.kind == Kind.SLOTS) | (trace.kind == Kind.READ_FAILED)
    if (sizes[alone] != 1).any():
        _refuse(trace, "a record that has one id has several")
    if (trace.number < sizes)[trace.kind == Kind.ACQUIRE].any():
        _refuse(trace, "an acquire has more experts than pairs of token and expert")
    if (trace.number > sizes)[trace.kind == Kind.FETCH].any():
        _refuse(trace, "a fetch brings in more experts than it names")
    if (trace.number >= len(trace.layers))[trace.kind == Kind.AHEAD].any():
        _refuse(trace, "experts of a layer that there is not must stay")
    _check_end(trace)
    _check_places(trace)


def _refuse(trace: Trace, what: str) -> None:
    raise TraceError(f"{trace.path} is damaged: {what}: record the trace again")


def _check_ids(trace: Trace) -> None:
    n_expert = np.array([layer.n_expert for layer in trace.layers])
    first, n_events = 0, len(trace.kind)
    while first < n_events:
        start = trace.start[first]
        last = max(first + 1, int(np.searchsorted(trace.start, start + _CHUNK_IDS, "right")) - 1)
        ids = trace.ids[start : trace.start[last]]
        event = np.repeat(np.arange(first, last), np.diff(trace.start[first : last + 1]))
        named = trace.kind[event] != Kind.SLOTS
        if (ids >= n_expert[trace.layer[event]])[named].any():
            _refuse(trace, "a record names an expert that its layer does not have")
        pairs = np.sort((event * np.int64(1 << 16) + ids)[named])
        if (pairs[1:] == pairs[:-1]).any():
            _refuse(trace, "a record names an expert twice")
        first = last


def _check_end(trace: Trace) -> None:
    if trace.end is None:
        return
    acquires = trace.kind == Kind.ACQUIRE
    n_acquires, n_ids = int(acquires.sum()), int(np.diff(trace.start)[acquires].sum())
    if trace.end.acquires != n_acquires:
        _refuse(trace, f"it holds {n_acquires} acquires of {trace.end.acquires}")
    if trace.end.hits + trace.end.misses != n_ids:
        _refuse(
            trace, f"its acquires name {n_ids} experts, but hits and misses are {trace.end.hits + trace.end.misses}"
        )


def _check_places(trace: Trace) -> None:
    """Slots are as many as a pool can have, and who uses a layer's slots comes after they were given."""
    if not (trace.kind == Kind.SLOTS).any():
        return
    starts = trace.session_starts()
    events = np.arange(len(trace.kind))
    given = np.full(len(trace.layers), len(events))  # [n_layers] the event that gave the layer its slots
    n_slots = np.zeros(len(trace.layers), np.int64)
    for first, last in zip(starts, [*starts[1:], len(events)], strict=True):
        kind, layer = trace.kind[first:last], trace.layer[first:last]
        placed = first + np.flatnonzero(kind == Kind.SLOTS)
        given[trace.layer[placed]] = placed
        n_slots[trace.layer[placed]] = trace.number[placed]
        if ((given[layer] < first) | (given[layer] > events[first:last])).any():
            _refuse(trace, "a record uses slots of a layer that has none")
        fetches = (kind == Kind.FETCH) | (kind == Kind.AHEAD)
        if (np.diff(trace.start[first : last + 1])[fetches] > n_slots[layer[fetches]]).any():
            _refuse(trace, "a fetch needs more slots than its layer has")
        pools = trace.recorded_pools(first, last)
        for pool in pools:
            of_layers = n_slots[list(pool.layers)]
            if not 1 <= pool.n_slots <= pool.n_experts or (of_layers != pool.n_slots).any():
                _refuse(trace, f"a pool of {pool.n_experts} experts has {of_layers.min()} to {of_layers.max()} slots")
        _check_size(trace, len(pools))


def _check_size(trace: Trace, n_pools: int) -> None:
    if n_pools * trace.n_keys > _MAX_PAIRS:
        raise TraceError(
            f"{trace.path} has {n_pools} pools and {trace.n_keys} experts: "
            f"more than {_MAX_PAIRS} pairs of both are no real model's, record it again"
        )
