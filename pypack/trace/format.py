"""The bytes of a trace: header, records, end. docs/FORMAT.md is the specification; native writes the same records."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from ..errors import TraceError
from ..format.layout import Layer

MAGIC = b"LXPTRACE"
VERSION = 2
READABLE = (1, VERSION)  # version 1 has no record of kind AHEAD
RECORD_BYTES = 16  # of a record without its ids
MAX_LAYERS, MAX_EXPERTS = 0xFFFF, 1 << 16
MAX_TABLE = 1 << 22  # layers times the most experts of one: the largest models have a fiftieth of that
NO_LAYER = 0xFFFF
_POLICY = re.compile(rb"[!-~]*")  # can be printed
_HEADER = struct.Struct("<8sIIII32sII")
_LAYER = struct.Struct("<IIQ")
_RECORD = struct.Struct("<HHIII")
_END = struct.Struct("<6Q")
END_BYTES = RECORD_BYTES + _END.size


class Kind(IntEnum):
    """What a record says."""

    ACQUIRE = 0
    SLOTS = 1
    FETCH = 2
    READ_FAILED = 3
    END = 4
    AHEAD = 5


class Head(NamedTuple):
    """The header: ``policy`` is "" if no run wrote the trace; layers have numbers and sizes, but no roles."""

    policy: str
    top_k: int
    layers: tuple[Layer, ...]


class TraceEnd(NamedTuple):
    """The counters of the run when its trace ended."""

    acquires: int
    hits: int
    misses: int
    evictions: int
    failures: int


def encode_header(layers: Sequence[Layer], top_k: int, policy: str) -> bytes:
    """Raises :class:`TraceError` for a model that a trace can't describe."""
    n_most = max(layer.n_expert for layer in layers)
    if len(layers) > MAX_LAYERS or n_most > MAX_EXPERTS or len(layers) * n_most > MAX_TABLE:
        raise TraceError(
            f"a trace holds up to {MAX_LAYERS} layers of up to {MAX_EXPERTS} experts, and {MAX_TABLE} in all; "
            f"this model has {len(layers)} layers of up to {n_most}: run it without a trace"
        )

    def header(crc: int) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, size, len(layers), top_k, policy.encode("ascii"), 0, crc) + table

    try:
        table = b"".join(_LAYER.pack(layer.n_expert, layer.block, layer.block_bytes) for layer in layers)
        size = _HEADER.size + len(table)
        return header(zlib.crc32(header(0)))
    except struct.error:
        raise TraceError(
            f"a trace holds block numbers and a top-k below 2^32; this model has blocks up to "
            f"{max(layer.block for layer in layers)} and top-{top_k}: run it without a trace"
        ) from None


def decode_header(data: bytes | bytearray, path: object) -> tuple[Head, int]:
    """The header and its size in bytes. Raises :class:`TraceError`."""
    if len(data) < _HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise TraceError(f"{path} is not an expert trace: it starts with {bytes(data[:8])!r} instead of {MAGIC!r}")
    _, version, size, n_layers, top_k, name, zero, crc = _HEADER.unpack_from(data)
    if version not in READABLE:
        versions = " and ".join(map(str, READABLE))
        raise TraceError(f"{path} has trace version {version}, this package reads {versions}: record it again")
    if size != _HEADER.size + n_layers * _LAYER.size or n_layers == 0 or len(data) < size:
        raise TraceError(f"{path}: the header is damaged ({n_layers} layers in {size} bytes): record the trace again")
    blank = bytearray(data[:size])
    blank[_HEADER.size - 4 : _HEADER.size] = bytes(4)
    if zlib.crc32(blank) != crc or zero:
        raise TraceError(f"{path}: the header is damaged (its checksum does not match): record the trace again")
    layers: list[Layer] = []
    first_key = 0
    for index, (n_expert, block, block_bytes) in enumerate(_LAYER.iter_unpack(data[_HEADER.size : size])):
        if not 0 < n_expert <= MAX_EXPERTS or block_bytes == 0 or top_k == 0:
            raise TraceError(f"{path}: layer {index} has {n_expert} experts of {block_bytes} bytes: record it again")
        layers.append(Layer(index, block, "exps", n_expert, first_key, block_bytes, ()))
        first_key += n_expert
    policy = name.rstrip(b"\0")
    if not _POLICY.fullmatch(policy):
        raise TraceError(f"{path}: {policy!r} can't be the name of a cache policy: record the trace again")
    n_most = max(layer.n_expert for layer in layers)
    if n_layers * n_most > MAX_TABLE:
        raise TraceError(
            f"{path}: {n_layers} layers of up to {n_most} experts are more than the {MAX_TABLE} in all that a trace may "
            "have: record it again"
        )
    return Head(policy.decode("ascii"), top_k, tuple(layers)), size


def decode_end(data: bytes | memoryview) -> tuple[int, int, TraceEnd] | None:
    """(CRC-32 of the records, their bytes, counters) if these END_BYTES are an end mark."""
    layer, kind, _, crc, n_ids = _RECORD.unpack_from(data)
    if layer != NO_LAYER or kind != Kind.END or n_ids * 2 != _END.size:
        return None
    n_bytes, *counters = _END.unpack_from(data, RECORD_BYTES)
    return crc, n_bytes, TraceEnd(*counters)
