"""A finished pack, opened and checked: where each expert's block lies and what its digest is."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import PackError, UsageError
from ..system.os_errors import os_errors
from ..system.regular_file import open_regular
from ..values.checks import check_path
from .header import ENTRY, HEADER_BYTES, Header, Index, decode_header, make_header, make_index
from .layout import ALIGNMENT, Layer, payload_bytes
from .manifest import MAX_MANIFEST_BYTES, Manifest, canonical_sha256, decode_manifest

PACK_SUFFIX = ".expert-pack"
MANIFEST_SUFFIX = ".manifest.json"


@dataclass(frozen=True)
class Pack:
    """An opened pack; ``index`` has one entry for each key."""

    path: Path
    manifest: Manifest
    header: Header
    index: Index

    @property
    def layers(self) -> list[Layer]:
        """In order of their ``index``."""
        return list(self.manifest.layers)

    @property
    def n_keys(self) -> int:
        """Number of experts, of all layers together."""
        return self.header.n_keys

    @property
    def payload_bytes(self) -> int:
        """Bytes of all blocks, padding included."""
        return payload_bytes(self.manifest.layers)

    def offset(self, layer: int, expert: int) -> int:
        """Byte of the file where an expert of layer number ``layer`` starts; it is the layer's ``block_bytes`` long.

        Raises IndexError if there is no such expert.
        """
        return int(self.index[self._key(layer, expert)]["offset"])

    def digest(self, layer: int, expert: int) -> bytes:
        """xxh3_128 of the expert's whole block, 16 bytes, big-endian. Raises IndexError if there is no such expert."""
        return bytes(self.index[self._key(layer, expert)]["digest"].tobytes())

    def _key(self, layer: int, expert: int) -> int:
        found = self.manifest.layers[layer]
        if layer < 0 or not 0 <= expert < found.n_expert:
            raise IndexError(f"layer {layer} has experts 0 to {found.n_expert - 1}, not {expert}")
        return found.first_key + expert


def manifest_path(pack_path: Path) -> Path:
    """Where the manifest of a pack lies: beside it. For a link that has none beside it, beside the pack itself.

    Raises UsageError for a path that ends in no name.
    """
    if not pack_path.name:  # "." or "/"
        raise UsageError(f"{pack_path} is a folder: give the path of an {PACK_SUFFIX} file")
    beside = pack_path.with_name(pack_path.name + MANIFEST_SUFFIX)
    if pack_path.is_symlink() and not os.path.lexists(beside):
        return Path(os.path.realpath(pack_path) + MANIFEST_SUFFIX)
    return beside


def open_pack(path: str | os.PathLike[str]) -> Pack:
    """Opens a pack and checks its structure: header, manifest, index and file size must all fit together.

    Blocks are not read. Raises PackError, ReadError if the operating system refuses, UsageError for an impossible path.
    """
    path = Path(check_path("the path of the pack", path))
    with os_errors(path):
        where = manifest_path(path)
        try:
            fd = open_regular(path)
        except FileNotFoundError:
            raise PackError(f"{path} does not exist: make it with `expert-pack convert`") from None
        except IsADirectoryError:
            raise PackError(f"{path} is a folder: give the path of an {PACK_SUFFIX} file in it") from None
        try:
            page = os.pread(fd, HEADER_BYTES, 0)
            decode_header(page, path, os.fstat(fd).st_size)  # before its manifest is looked for: it may be no pack
            return check_pack(path, fd, page, _read_manifest(path, where), where)
        finally:
            os.close(fd)


def check_pack(path: Path, fd: int, page: bytes, manifest_data: bytes, where: Path) -> Pack:
    """The pack that ``fd`` is open at, if header page, manifest and index fit together. Raises PackError, OSError.

    ``path``, ``where``: of the pack and its manifest, for messages.
    """
    header = decode_header(page, path, os.fstat(fd).st_size)
    index_bytes = _read_index(path, fd, header)
    manifest = decode_manifest(manifest_data, where)
    if canonical_sha256(manifest) != header.manifest_sha256:
        raise PackError(
            f"{where} was changed or belongs to another pack (its sha256 is not in the header of {path.name})"
        )
    if manifest.header_sha256 != hashlib.sha256(page).hexdigest():
        raise PackError(f"{where} belongs to another pack: header_sha256 is not that of {path.name}")
    index = np.frombuffer(index_bytes, ENTRY)
    _check_places(path, manifest, header, index)
    return Pack(path, manifest, header, index)


def _read_index(path: Path, fd: int, header: Header) -> bytes:
    expected = (HEADER_BYTES, header.n_keys * ENTRY.itemsize)
    if (header.index_offset, header.index_bytes) != expected or sum(expected) > header.file_bytes:
        raise PackError(f"{path}: the header places the index outside its bounds: convert the model again")
    index = os.pread(fd, header.index_bytes, header.index_offset)
    gap = os.pread(fd, -(HEADER_BYTES + len(index)) % ALIGNMENT, HEADER_BYTES + len(index))
    if any(gap):
        raise PackError(f"{path}: bytes behind the index are not zero: convert the model again")
    if hashlib.sha256(index).digest() != header.index_sha256:
        raise PackError(f"{path}: the index is damaged (its sha256 differs from the header's): convert the model again")
    return index


def _read_manifest(path: Path, where: Path) -> bytes:
    try:
        with open(open_regular(where), "rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise PackError(
            f"{path} has no manifest ({where.name}): the conversion did not finish; run `expert-pack convert` again"
        ) from None


def _check_places(path: Path, manifest: Manifest, header: Header, index: Index) -> None:
    """With the manifest trusted, every place in header and index must be the one that the layout gives."""
    n_keys = manifest.layers[-1].first_key + manifest.layers[-1].n_expert
    if len(index) != n_keys:  # before so many are made: it may be any number
        raise PackError(f"{path}: the index has {len(index)} entries instead of {n_keys}: convert the model again")
    expected = make_index(manifest.layers)
    computed = make_header(manifest.layers, index.tobytes(), header.manifest_sha256)
    for field, found, wanted in zip(Header._fields, header, computed, strict=True):
        if found != wanted:
            raise PackError(f"{path}: the header has {field} {found!r} instead of {wanted!r}: convert the model again")
    for name in ("file_id", "reserved", "offset", "length"):
        wrong = np.flatnonzero(index[name] != expected[name])
        if len(wrong):
            key = int(wrong[0])
            raise PackError(
                f"{path}: index entry {key} has {name} {index[name][key]} instead of {expected[name][key]}: "
                "convert the model again"
            )
