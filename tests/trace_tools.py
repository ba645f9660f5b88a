"""The bytes of a trace, as docs/FORMAT.md describes them; the header's come from the package, which native continues."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llama_expert_pack.pypack.trace.format import Kind, TraceEnd, encode_header
from llama_expert_pack.pypack.trace.trace import Trace


def encode_record(layer: int, kind: int, step: int, number: int, ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    return struct.pack("<HHIII", layer, kind, step, number, len(ids)) + np.asarray(ids, "<u2").tobytes()


def encode_end(records: bytes, end: TraceEnd) -> bytes:
    """The last record, behind ``records``."""
    numbers = struct.pack("<6Q", len(records), *end)
    return encode_record(0xFFFF, Kind.END, 0, zlib.crc32(records), np.frombuffer(numbers, "<u2").astype(np.int32))


def encode(trace: Trace) -> bytes:
    """The file that the trace was read from, if it was whole."""
    assert trace.end is not None
    records = b"".join(
        encode_record(int(layer), int(kind), int(step), int(number), trace.event(i))
        for i, (layer, kind, step, number) in enumerate(
            zip(trace.layer, trace.kind, trace.step, trace.number, strict=True)
        )
    )
    return encode_header(trace.layers, trace.top_k, trace.policy) + records + encode_end(records, trace.end)
