"""The binary part of a pack: header page and index. docs/FORMAT.md is the specification."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import PackError
from .layout import ALIGNMENT, Layer, align_up, payload_bytes

MAGIC = b"LXPTPACK"
VERSION = 1
HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sIIIIQQQQQ32s32s")

ENTRY = np.dtype(
    [("file_id", "<u4"), ("reserved", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("digest", "u1", (16,))]
)
ENTRY_BYTES = ENTRY.itemsize
Index = np.ndarray[Any, np.dtype[np.void]]


class Header(NamedTuple):
    """The first page of a pack. Offsets and sizes in bytes; the hashes are sha256 digests."""

    alignment: int
    n_layers: int
    n_keys: int
    index_offset: int
    index_bytes: int
    data_start: int
    file_bytes: int
    index_sha256: bytes
    manifest_sha256: bytes

    def encode(self) -> bytes:
        """The whole page, zero-filled."""
        packed = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, self.alignment, self.n_layers, *self[2:])
        return packed.ljust(HEADER_BYTES, b"\0")


def make_header(layers: Sequence[Layer], index: bytes, manifest_sha256: bytes) -> Header:
    """The header of a pack with these layers. ``index``: its bytes; ``manifest_sha256``: 32 bytes."""
    n_keys = layers[-1].first_key + layers[-1].n_expert
    data_start = align_up(HEADER_BYTES + n_keys * ENTRY_BYTES, ALIGNMENT)
    assert len(index) == n_keys * ENTRY_BYTES and layers[0].data_offset == data_start
    return Header(
        alignment=ALIGNMENT,
        n_layers=len(layers),
        n_keys=n_keys,
        index_offset=HEADER_BYTES,
        index_bytes=len(index),
        data_start=data_start,
        file_bytes=data_start + payload_bytes(layers),
        index_sha256=hashlib.sha256(index).digest(),
        manifest_sha256=manifest_sha256,
    )


def decode_header(page: bytes, path: object, size_bytes: int) -> Header:
    """Reads the header page of a file of this size. Raises PackError if it is not that of a finished pack."""
    if len(page) < HEADER_BYTES:
        raise PackError(f"{path} is too short for a pack: {size_bytes} bytes, the header alone is {HEADER_BYTES}")
    if not any(page):
        raise PackError(f"{path} is an unfinished pack (its header is empty): run `expert-pack convert` again")
    magic, version, header_bytes, alignment, n_layers, *rest = _HEADER.unpack_from(page)
    if magic != MAGIC:
        raise PackError(f"{path} is not an expert pack: it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise PackError(f"{path} has pack version {version}, this package reads {VERSION}: convert the model again")
    header = Header(alignment, n_layers, *rest)
    if header_bytes != HEADER_BYTES or page != header.encode():
        raise PackError(f"{path}: the header is damaged (unused bytes are not zero): convert the model again")
    if header.file_bytes != size_bytes:
        raise PackError(f"{path} has {size_bytes} bytes instead of {header.file_bytes}: copy or convert it again")
    return header


def make_index(layers: Sequence[Layer]) -> Index:
    """The index with every place filled in and every digest zero."""
    n_keys = layers[-1].first_key + layers[-1].n_expert
    index = np.zeros(n_keys, ENTRY)
    for layer in layers:
        experts = np.arange(layer.n_expert, dtype=np.uint64)
        rows = index[layer.first_key : layer.first_key + layer.n_expert]
        rows["offset"] = layer.data_offset + experts * np.uint64(layer.block_bytes)
        rows["length"] = layer.block_bytes
    return index
