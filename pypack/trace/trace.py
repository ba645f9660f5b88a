"""A recorded run: which experts every acquire asked for, in order."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import TraceError
from ..format.layout import Layer, payload_bytes
from ..placement.budget import plan_pools
from ..policy.pool import Pool
from .check import check_trace
from .content import read_content
from .format import END_BYTES, RECORD_BYTES, Head, Kind, TraceEnd, decode_end, decode_header

_HEAD_WORDS = RECORD_BYTES // 2
Int32s = NDArray[np.int32]


@dataclass(frozen=True)
class Trace:
    """Records in order. Those of one event i: ``kind[i]``, ``layer[i]``, ``step[i]``, ``number[i]`` and
    ``ids[start[i]:start[i + 1]]``; :mod:`llama_expert_pack.pypack.trace.format` says what they mean for each kind.

    ``end``: the live counters, None if no run wrote the trace or it was cut off.
    """

    path: str
    policy: str
    top_k: int
    layers: tuple[Layer, ...]
    kind: NDArray[np.uint8]
    layer: Int32s
    step: NDArray[np.int64]
    number: NDArray[np.int64]
    start: NDArray[np.int64]  # [n_events + 1]
    ids: Int32s
    end: TraceEnd | None = None

    @property
    def n_keys(self) -> int:
        """Number of experts, of all layers together."""
        return self.layers[-1].first_key + self.layers[-1].n_expert

    @property
    def payload_bytes(self) -> int:
        """Bytes of all experts."""
        return payload_bytes(self.layers)

    def event(self, i: int) -> Int32s:
        """The ids of event i."""
        return self.ids[self.start[i] : self.start[i + 1]]

    def keys(self) -> NDArray[np.int64]:
        """[len(ids)] key of each id."""
        first = np.array([layer.first_key for layer in self.layers], np.int64)
        return np.repeat(first[self.layer], np.diff(self.start)) + self.ids

    def only_acquires(self) -> Trace:
        """The acquires alone."""
        chosen = self.kind == Kind.ACQUIRE
        if chosen.all():
            return self
        sizes = np.diff(self.start)
        return Trace(
            self.path, self.policy, self.top_k, self.layers,
            self.kind[chosen], self.layer[chosen], self.step[chosen], self.number[chosen],
            np.concatenate(([0], np.cumsum(sizes[chosen]))), self.ids[np.repeat(chosen, sizes)], self.end,
        )  # fmt: skip

    def session_starts(self) -> list[int]:
        """The first event, and each one at which a server that had slept loaded the model again: it gives a place to a
        layer that has one. All slots are empty then, and the policy has forgotten everything."""
        starts, placed = [0], set[int]()
        for i in np.flatnonzero(self.kind == Kind.SLOTS).tolist():
            layer = int(self.layer[i])
            if layer in placed:
                starts.append(i)
                placed.clear()
            placed.add(layer)
        return starts

    def recorded_pools(self, first: int = 0, last: int | None = None) -> list[Pool]:
        """The pools of the session that has the events first .. last - 1. Raises :class:`TraceError` if the trace does
        not say."""
        arenas: dict[int, dict[int, int]] = {}  # arena -> layer -> slots
        for i in (first + np.flatnonzero(self.kind[first:last] == Kind.SLOTS)).tolist():
            arenas.setdefault(int(self.event(i)[0]), {})[int(self.layer[i])] = int(self.number[i])
        if not arenas:
            raise TraceError(f"{self.path}: no run with a cache wrote this trace, so its pools are not known")
        pools: list[Pool] = []
        for slots in arenas.values():
            groups: dict[int, list[Layer]] = {}
            for layer in slots:
                groups.setdefault(self.layers[layer].block_bytes, []).append(self.layers[layer])
            for size, layers in groups.items():
                pools.append(_pool(size, layers, slots[layers[0].index], self.top_k, pools))
        return pools

    def pools(self, budget_bytes: int, host_bytes: int = 0) -> list[Pool]:
        """The pools of another budget, on one device and in host memory. Raises :class:`BudgetError` if it is too small."""
        return list(plan_pools(self.layers, budget_bytes, self.top_k, host_bytes=host_bytes).pools)


def read_trace(path: str | os.PathLike[str], *, allow_cut: bool = False) -> Trace:
    """Reads and checks a trace, compressed if its name ends in .xz. ``allow_cut``: take the complete records of one
    that was not ended.

    Raises :class:`TraceError`.
    """
    try:
        return _decode(read_content(path), path, allow_cut)
    except MemoryError:
        raise TraceError(f"{path}: there is not enough memory to read the trace: free some") from None


def _decode(data: bytes | bytearray, path: str | os.PathLike[str], allow_cut: bool) -> Trace:
    head, size = decode_header(data, path)
    body = memoryview(data)[size:]
    found = decode_end(body[-END_BYTES:]) if len(body) >= END_BYTES else None
    if found is None:
        if not allow_cut:
            raise TraceError(
                f"{path} has no end mark: the run was killed, is still going on, or could not write; "
                "--allow-cut (in Python allow_cut=True) uses what is there"
            )
        records, end = body[: len(body) // 2 * 2], None
    else:
        crc, n_bytes, end = found
        records = body[:-END_BYTES]
        if n_bytes != len(records) or n_bytes % 2 or zlib.crc32(records) != crc:
            raise TraceError(f"{path} is damaged: {n_bytes} bytes of records with another checksum were written")
    words = np.frombuffer(records, "<u2")
    places, n_words = _find_records(records, path, allow_cut and end is None)
    trace = _split(words[:n_words], places, str(path), head, end if head.policy else None)
    check_trace(trace)
    return trace


def _pool(size: int, layers: list[Layer], n_slots: int, top_k: int, before: list[Pool]) -> Pool:
    first_slot = sum(pool.n_slots for pool in before)
    n_per_token = sum(min(top_k, layer.n_expert) for layer in layers)
    n_experts = sum(layer.n_expert for layer in layers)
    return Pool(size, tuple(layer.index for layer in layers), n_experts, first_slot, n_slots, 0, n_per_token)


def _find_records(records: memoryview, path: object, allow_cut: bool) -> tuple[NDArray[np.int64], int]:
    """Where each record starts, and where the last one ends, in words of 2 bytes."""
    words = records.cast("H")
    places: list[int] = []
    at, n_words = 0, len(words)
    while at + _HEAD_WORDS <= n_words:
        after = at + _HEAD_WORDS + (words[at + 6] | words[at + 7] << 16)
        if after > n_words:
            break
        places.append(at)
        at = after
    if at != n_words and not allow_cut:
        raise TraceError(f"{path} is damaged: the record at byte {2 * at} of the records is longer than the trace")
    return np.array(places, np.int64), at


def _is_id(places: NDArray[np.int64], n_words: int) -> NDArray[np.bool_]:
    chosen = np.ones(n_words, np.bool_)
    for i in range(_HEAD_WORDS):
        chosen[places + i] = False
    return chosen


def _split(words: NDArray[np.uint16], places: NDArray[np.int64], path: str, head: Head, end: TraceEnd | None) -> Trace:
    def number(i: int) -> NDArray[np.int64]:
        low: NDArray[np.int64] = words[places + i].astype(np.int64)
        return low | words[places + i + 1].astype(np.int64) << 16

    start = np.concatenate((np.zeros(1, np.int64), np.cumsum(number(6))))
    ids = words[_is_id(places, len(words))].astype(np.int32)
    kind, layer = words[places + 1], words[places].astype(np.int32)
    unknown = kind[(kind > Kind.READ_FAILED) & (kind != Kind.AHEAD)]
    if len(unknown):
        raise TraceError(f"{path} is damaged: there is no record of kind {unknown.max()}")
    return Trace(path, *head, kind.astype(np.uint8), layer, number(2), number(4), start, ids, end)
