"""A finished pack, opened and checked: where each expert's block lies and what its digest is."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pypack.errors import PackError, ReadError, SourceMismatchError
from pypack.fingerprint import source_difference, source_fingerprint
from pypack.gguf_source import model_stem, read_model
from pypack.layout import ALIGNMENT, Extent, Layer, payload_bytes
from pypack.manifest import MAX_MANIFEST_BYTES, Manifest, canonical_sha256, decode_manifest
from pypack.pack_format import ENTRY, HEADER_BYTES, Header, Index, decode_header, make_header, make_index

__all__ = [
    "MANIFEST_SUFFIX",
    "PACK_SUFFIX",
    "Extent",
    "Pack",
    "find_pack",
    "manifest_path",
    "open_pack",
    "pack_path_for",
]

PACK_SUFFIX = ".expert-pack"
MANIFEST_SUFFIX = ".manifest.json"


@dataclass(frozen=True)
class Pack:
    """An opened pack. ``files`` are the paths that extents refer to; ``index`` has one entry for each key."""

    path: Path
    manifest: Manifest
    header: Header
    files: list[Path]
    index: Index

    @property
    def layers(self) -> list[Layer]:
        return list(self.manifest.layers)

    @property
    def n_keys(self) -> int:
        return self.header.n_keys

    @property
    def payload_bytes(self) -> int:
        """Bytes of all blocks, padding included."""
        return payload_bytes(self.manifest.layers)

    def extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        """Where to read an expert of layer number ``layer``: together exactly ``block_bytes`` bytes."""
        entry = self.index[self._key(layer, expert)]
        return (Extent(int(entry["file_id"]), int(entry["offset"]), int(entry["length"]), 0),)

    def digest(self, layer: int, expert: int) -> bytes:
        """xxh3_128 of the expert's whole block, 16 bytes, big-endian."""
        return bytes(self.index[self._key(layer, expert)]["digest"].tobytes())

    def check_source(self, model_path: str | os.PathLike[str]) -> None:
        """Raises SourceMismatchError unless the pack was made from this model. Reads no experts."""
        found = source_fingerprint(read_model(model_path))
        difference = source_difference(self.manifest.source, found)
        if difference:
            raise SourceMismatchError(
                f"{self.path} does not belong to {model_path}: {difference}; convert the model again"
            )

    def _key(self, layer: int, expert: int) -> int:
        found = self.manifest.layers[layer]
        if layer < 0 or not 0 <= expert < found.n_expert:
            raise IndexError(f"layer {layer} has experts 0 to {found.n_expert - 1}, not {expert}")
        return found.first_key + expert


def manifest_path(pack_path: Path) -> Path:
    return pack_path.with_name(pack_path.name + MANIFEST_SUFFIX)


def pack_path_for(model_path: str | os.PathLike[str]) -> Path:
    """Where the pack of a model lies unless said otherwise: beside it, with its name."""
    return Path(model_path).with_name(model_stem(model_path) + PACK_SUFFIX)


def find_pack(model_path: str | os.PathLike[str]) -> Path:
    """The pack beside a model. Raises PackError if there is none."""
    path = pack_path_for(model_path)
    if not path.exists():
        raise PackError(
            f"no pack beside the model: {path} does not exist; make it with `expert-pack convert {model_path}`"
        )
    return path


def open_pack(path: str | os.PathLike[str]) -> Pack:
    """Opens a pack and checks its structure: header, manifest, index and file size must all fit together.

    Blocks are not read. Raises PackError, or ReadError if the operating system refuses.
    """
    path = Path(path)
    try:
        with open(path, "rb", buffering=0) as file:
            header, index_bytes = _read_binary_part(path, file.fileno())
    except FileNotFoundError:
        raise PackError(f"{path} does not exist: make it with `expert-pack convert`") from None
    except IsADirectoryError:
        raise PackError(f"{path} is a folder: give the path of an {PACK_SUFFIX} file in it") from None
    except OSError as error:
        raise ReadError(f"{path} cannot be read: {error.strerror}", error.errno or 0) from error
    manifest = _read_manifest(path, header)
    index = np.frombuffer(index_bytes, ENTRY)
    _check_places(path, manifest, header, index)
    return Pack(path, manifest, header, [path], index)


def _read_binary_part(path: Path, fd: int) -> tuple[Header, bytes]:
    size_bytes = os.fstat(fd).st_size
    if size_bytes < HEADER_BYTES:
        raise PackError(f"{path} is too short for a pack: {size_bytes} bytes, the header alone is {HEADER_BYTES}")
    header = decode_header(os.pread(fd, HEADER_BYTES, 0), path)
    if header.file_bytes != size_bytes:
        raise PackError(f"{path} has {size_bytes} bytes instead of {header.file_bytes}: copy or convert it again")
    expected = (HEADER_BYTES, header.n_keys * ENTRY.itemsize)
    if (header.index_offset, header.index_bytes) != expected or sum(expected) > size_bytes:
        raise PackError(f"{path}: the header places the index outside its bounds: convert the model again")
    index = os.pread(fd, header.index_bytes, header.index_offset)
    gap = os.pread(fd, -(HEADER_BYTES + len(index)) % ALIGNMENT, HEADER_BYTES + len(index))
    if any(gap):
        raise PackError(f"{path}: bytes behind the index are not zero: convert the model again")
    if hashlib.sha256(index).digest() != header.index_sha256:
        raise PackError(f"{path}: the index is damaged (its sha256 differs from the header's): convert the model again")
    return header, index


def _read_manifest(path: Path, header: Header) -> Manifest:
    where = manifest_path(path)
    try:
        with open(where, "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise PackError(
            f"{path} has no manifest ({where.name}): the conversion did not finish; run `expert-pack convert` again"
        ) from None
    except OSError as error:
        raise ReadError(f"{where} cannot be read: {error.strerror}", error.errno or 0) from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise PackError(f"{where} is larger than {MAX_MANIFEST_BYTES} bytes: it is not a manifest")
    manifest = decode_manifest(data, where)
    if canonical_sha256(manifest) != header.manifest_sha256:
        raise PackError(
            f"{where} was changed or belongs to another pack (its sha256 is not in the header of {path.name})"
        )
    if manifest.header_sha256 != hashlib.sha256(header.encode()).hexdigest():
        raise PackError(f"{where} belongs to another pack: header_sha256 is not that of {path.name}")
    return manifest


def _check_places(path: Path, manifest: Manifest, header: Header, index: Index) -> None:
    """With the manifest trusted, every place in header and index must be the one that the layout gives."""
    expected = make_index(manifest.layers)
    if len(index) != len(expected):
        raise PackError(
            f"{path}: the index has {len(index)} entries instead of {len(expected)}: convert the model again"
        )
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
