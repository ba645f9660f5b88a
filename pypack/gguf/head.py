"""The head of one GGUF file: header, metadata, tensor table.

    char[4]  "GGUF"        u32 version (2 or 3)      u64 n_tensors      u64 n_kv
    n_kv     x { string key, u32 value type, value }             string = u64 length, bytes
    n_tensors x { string name, u32 n_dims, u64 ne[n_dims], u32 type, u64 offset }
    zeros up to general.alignment (default 32), then the tensors' data; offsets count from there

All little-endian. The reader keeps a window of a few MiB, whatever the file claims.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ..errors import GGUFError, ReadError
from ..ggml_types import GGML_TYPES, row_bytes
from ..system.regular_file import open_regular

Scalar = bool | int | float | str

MAX_NAME_BYTES = 64  # GGML_MAX_NAME, with its final zero
MAX_STRING_BYTES = 64 << 20
MAX_KEPT_VALUES = 1024  # arrays up to this length are kept: one value a block, not a vocabulary
DEFAULT_ALIGNMENT = 32
_INT64_MAX = (1 << 63) - 1
_WINDOW_BYTES = 4 << 20

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model: ``size_bytes`` at the absolute ``offset`` of shard ``file_id``."""

    name: str
    type: int
    ne: tuple[int, ...]
    file_id: int
    offset: int
    size_bytes: int

    @property
    def type_name(self) -> str:
        """ggml's name of the type, such as "Q4_K"."""
        return GGML_TYPES[self.type].name


@dataclass(frozen=True)
class Head:
    """What one file says about itself; ``sha256`` covers all bytes in front of the data's padding."""

    size_bytes: int
    metadata: dict[str, Scalar | tuple[int | float, ...]]
    tensors: tuple[Tensor, ...]
    sha256: str


def read_head(path: Path, file_id: int) -> Head:
    """Reads and checks the head of one file. Raises GGUFError, or ReadError if it cannot be read at all."""
    try:
        fd = open_regular(path)
        try:
            return _parse(_Cursor(path, fd, os.fstat(fd).st_size), file_id)
        finally:
            os.close(fd)
    except IsADirectoryError:
        raise GGUFError(f"{path} is a folder: give the path of a .gguf file in it") from None
    except FileNotFoundError:
        raise GGUFError(f"{path} does not exist: check the model's path") from None
    except OSError as error:
        raise ReadError(f"{path} cannot be read: {error.strerror}; check the model's path", error.errno or 0) from error


class _Cursor:
    """Reads forward through a file, hashing what it passes, and refuses to pass the end."""

    def __init__(self, path: Path, fd: int, size_bytes: int) -> None:
        self.path, self.size_bytes = path, size_bytes
        self._fd = fd
        self._sha = hashlib.sha256()
        self._window = b""
        self._pos = 0  # in the window
        self._base = 0  # of the window in the file

    @property
    def offset(self) -> int:
        return self._base + self._pos

    @property
    def remaining(self) -> int:
        return self.size_bytes - self.offset

    def sha256(self) -> str:
        sha = self._sha.copy()
        sha.update(self._window[: self._pos])
        return sha.hexdigest()

    def fail(self, problem: str) -> GGUFError:
        return GGUFError(f"{self.path}: {problem}: download or convert the model again")

    def need(self, n: int, what: str) -> None:
        """Makes the next ``n`` bytes available in the window."""
        if n > self.remaining:
            raise self.fail(
                f"truncated: {what} at byte {self.offset} needs {n} bytes, the file ends after {self.remaining}"
            )
        if self._pos + n > len(self._window):
            self._advance(n)

    def _advance(self, n: int) -> None:
        self._sha.update(self._window[: self._pos])
        kept = self._window[self._pos :]
        self._base += self._pos
        self._pos = 0
        chunk = os.pread(self._fd, max(n, _WINDOW_BYTES) - len(kept), self._base + len(kept))
        self._window = kept + chunk
        while len(self._window) < n:
            chunk = os.pread(self._fd, n - len(self._window), self._base + len(self._window))
            if not chunk:
                raise self.fail(f"truncated while it was read, at byte {self._base + len(self._window)}")
            self._window += chunk

    def take(self, n: int, what: str) -> bytes:
        self.need(n, what)
        start = self._pos
        self._pos += n
        return self._window[start : self._pos]

    def skip(self, n: int, what: str) -> None:
        while n > 0:
            step = min(n, _WINDOW_BYTES)
            self.need(step, what)
            self._pos += step
            n -= step

    def scalar(self, fmt: str, what: str) -> int:
        value: int = struct.unpack(fmt, self.take(struct.calcsize(fmt), what))[0]
        return value

    def string(self, what: str) -> str:
        n = self.scalar("<Q", f"length of {what}")
        if n > min(self.remaining, MAX_STRING_BYTES):
            raise self.fail(f"{what} claims {n} bytes at byte {self.offset} of a file of {self.size_bytes} bytes")
        try:
            return self.take(n, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} at byte {self.offset} is not UTF-8 text") from None

    def skip_strings(self, count: int, what: str) -> None:
        """Passes ``count`` strings; a vocabulary has 160,000 of them, so the loop only touches integers."""
        unpack = struct.Struct("<Q").unpack_from
        while count:
            self.need(8, what)
            window, end, pos = self._window, len(self._window) - 8, self._pos
            n = 0
            while count and pos <= end:
                n = unpack(window, pos)[0]
                if n > _WINDOW_BYTES or pos + 8 + n > len(window):
                    break
                pos += 8 + n
                count -= 1
            moved = pos != self._pos
            self._pos = pos
            if count and not moved:
                if n > self.remaining - 8:
                    raise self.fail(f"a string of {what} claims {n} bytes, {self.remaining - 8} are left")
                self.skip(8 + n, what)
                count -= 1


def _parse(cursor: _Cursor, file_id: int) -> Head:
    n_tensors, n_kv = _parse_header(cursor)
    metadata = _parse_metadata(cursor, n_kv)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 31:
        raise cursor.fail(f"general.alignment must be a power of two, found {alignment!r}")
    table = [_parse_tensor(cursor, file_id, i) for i in range(n_tensors)]
    sha256 = cursor.sha256()
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = tuple(_place(cursor, tensor, data_start, alignment) for tensor in table)
    _check_extents(cursor, tensors, data_start, alignment)
    return Head(cursor.size_bytes, metadata, tensors, sha256)


def _parse_header(cursor: _Cursor) -> tuple[int, int]:
    path, size = cursor.path, cursor.size_bytes
    if size == 0:
        raise GGUFError(f"{path} is empty, not a GGUF: download the model again")
    cursor.need(min(size, 24), "header")
    start = cursor._window[:64].lstrip().lower()
    if not cursor._window.startswith(b"GGUF"):
        if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
            raise GGUFError(f"{path} is a web page, not a GGUF: download the file itself, not the page that shows it")
        if start.startswith(b"version https://git-lfs"):
            raise GGUFError(f"{path} is a Git LFS pointer, not a GGUF: fetch the file with `git lfs pull`")
        raise GGUFError(f"{path} is not a GGUF: it starts with {cursor._window[:4]!r} instead of b'GGUF'")
    if size < 24:
        raise GGUFError(f"{path} is too short for a GGUF: {size} bytes, the header alone is 24; download it again")
    cursor.take(4, "magic")
    version = cursor.scalar("<I", "version")
    if version & 0xFFFF == 0 and version:
        raise GGUFError(f"{path} is a big-endian GGUF: only little-endian ones run here; convert it for this machine")
    if version not in (2, 3):
        raise GGUFError(f"{path} is GGUF version {version}: versions 2 and 3 are supported; convert the model again")
    n_tensors = cursor.scalar("<Q", "tensor count")
    n_kv = cursor.scalar("<Q", "metadata count")
    # The smallest entries: a 1-byte name, one dimension; a 1-byte key with a 1-byte value.
    for what, count, smallest in (("tensors", n_tensors, 33), ("metadata entries", n_kv, 14)):
        if count > cursor.remaining // smallest:
            raise cursor.fail(f"the header claims {count} {what}, more than a file of {size} bytes can hold")
    return n_tensors, n_kv


def _parse_metadata(cursor: _Cursor, n_kv: int) -> dict[str, Scalar | tuple[int | float, ...]]:
    metadata: dict[str, Scalar | tuple[int | float, ...]] = {}
    seen: set[str] = set()
    for i in range(n_kv):
        key = cursor.string(f"metadata key {i}")
        if not key or key in seen:
            raise cursor.fail(f"metadata key {i} is {'a second ' + repr(key) if key else 'empty'}")
        seen.add(key)
        value = _parse_value(cursor, key, cursor.scalar("<I", f"type of {key!r}"))
        if value is not None:
            metadata[key] = value
    return metadata


def _parse_value(cursor: _Cursor, key: str, type_id: int) -> Scalar | tuple[int | float, ...] | None:
    if type_id in _SCALARS:
        return cursor.scalar(_SCALARS[type_id], f"value of {key!r}")
    if type_id == _STRING:
        return cursor.string(f"value of {key!r}")
    if type_id != _ARRAY:
        raise cursor.fail(f"metadata {key!r} has unknown value type {type_id}")
    element = cursor.scalar("<I", f"type of array {key!r}")
    count = cursor.scalar("<Q", f"length of array {key!r}")
    if element != _STRING and element not in _SCALARS:
        raise cursor.fail(f"metadata array {key!r} has unknown element type {element}")
    smallest = 8 if element == _STRING else struct.calcsize(_SCALARS[element])
    if count > cursor.remaining // smallest:
        raise cursor.fail(f"metadata array {key!r} claims {count} elements, more than the rest of the file can hold")
    if element == _STRING:
        cursor.skip_strings(count, f"array {key!r}")
    elif count <= MAX_KEPT_VALUES:
        data = cursor.take(count * smallest, f"array {key!r}")
        return struct.unpack(f"<{count}{_SCALARS[element][1]}", data)
    else:
        cursor.skip(count * smallest, f"array {key!r}")
    return None


def _parse_tensor(cursor: _Cursor, file_id: int, index: int) -> Tensor:
    """A row of the tensor table; ``offset`` still counts from the start of the data."""
    name = cursor.string(f"name of tensor {index}")
    if not name or len(name.encode()) >= MAX_NAME_BYTES:
        raise cursor.fail(f"tensor {index} has a name of {len(name.encode())} bytes, 1 to {MAX_NAME_BYTES - 1} allowed")
    n_dims = cursor.scalar("<I", f"dimensions of {name!r}")
    if not 1 <= n_dims <= 4:
        raise cursor.fail(f"tensor {name!r} has {n_dims} dimensions, 1 to 4 are allowed")
    ne = struct.unpack(f"<{n_dims}q", cursor.take(8 * n_dims, f"shape of {name!r}"))
    type_id = cursor.scalar("<I", f"type of {name!r}")
    offset = cursor.scalar("<Q", f"offset of {name!r}")
    if min(ne) <= 0:
        raise cursor.fail(f"tensor {name!r} has shape {list(ne)}: every dimension must be at least 1")
    if type_id not in GGML_TYPES:
        raise GGUFError(
            f"{cursor.path}: tensor {name!r} has unknown ggml type {type_id}: it needs a newer version of this package"
        )
    traits = GGML_TYPES[type_id]
    if ne[0] % traits.block_values:
        raise cursor.fail(
            f"tensor {name!r} has rows of {ne[0]} values, not a multiple of the {traits.block_values} that "
            f"{traits.name} packs together"
        )
    size_bytes = row_bytes(type_id, ne[0]) * prod(ne[1:])
    if prod(ne) > _INT64_MAX or size_bytes > _INT64_MAX:
        raise cursor.fail(f"tensor {name!r} has shape {list(ne)}, whose size overflows 63 bits")
    return Tensor(name, type_id, ne, file_id, offset, size_bytes)


def _place(cursor: _Cursor, tensor: Tensor, data_start: int, alignment: int) -> Tensor:
    """The tensor with its offset made absolute, after checking that it lies inside the file."""
    if tensor.offset % alignment:
        raise cursor.fail(f"tensor {tensor.name!r} is misaligned: offset {tensor.offset} is no multiple of {alignment}")
    end = data_start + tensor.offset + tensor.size_bytes
    if end > cursor.size_bytes:
        raise cursor.fail(
            f"truncated or out of range: tensor {tensor.name!r} ends at byte {end}, the file at {cursor.size_bytes}"
        )
    return Tensor(tensor.name, tensor.type, tensor.ne, tensor.file_id, data_start + tensor.offset, tensor.size_bytes)


def _check_extents(cursor: _Cursor, tensors: tuple[Tensor, ...], data_start: int, alignment: int) -> None:
    """Tensors must have distinct names and places, and nothing may follow the last one but its padding."""
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise cursor.fail(f"tensor {tensor.name!r} is there twice")
        names.add(tensor.name)
    end, last = data_start, None
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.size_bytes)):
        if tensor.offset < end and last is not None:
            raise cursor.fail(f"tensors {last.name!r} and {tensor.name!r} overlap at byte {tensor.offset}")
        end, last = tensor.offset + tensor.size_bytes, tensor
    padded = -(-end // alignment) * alignment
    if cursor.size_bytes > padded:
        raise GGUFError(
            f"{cursor.path}: {cursor.size_bytes - padded} bytes follow the last tensor "
            "(concatenated files?): keep shards as separate files, "
            "or merge them with llama-gguf-split --merge"
        )
