"""Writes GGUF files, single or split, with tensor data generated while it is written."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.synth.blocks import TYPES
from lab.synth.fills import fill
from lab.synth.shape import Tensor

ALIGNMENT = 32

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY = range(10)
_FORMATS = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}
_FIXED_BYTES = {U8: 1, I8: 1, U16: 2, I16: 2, U32: 4, I32: 4, F32: 4, BOOL: 1, 10: 8, 11: 8, 12: 8}


@dataclass(frozen=True)
class Typed:
    """A metadata value whose type is not the default one of its Python type."""

    type: int
    value: int


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value_type(value: Any) -> int:
    """int: UINT32, float: FLOAT32, bool: BOOL, str: STRING."""
    if isinstance(value, Typed):
        return value.type
    types = {bool: BOOL, int: U32, float: F32, str: STRING}
    return types[type(value)]


def _scalar(value: Any) -> bytes:
    if isinstance(value, str):
        return _string(value)
    raw = value.value if isinstance(value, Typed) else value
    return struct.pack(_FORMATS[_value_type(value)], raw)


def encode_kv(key: str, value: Any) -> bytes:
    """One metadata entry as it stands in the file."""
    if isinstance(value, (list, tuple)):
        head = struct.pack("<IIQ", ARRAY, _value_type(value[0]), len(value))
        return _string(key) + head + b"".join(_scalar(item) for item in value)
    return _string(key) + struct.pack("<I", _value_type(value)) + _scalar(value)


def read_kv(path: Path, prefix: str) -> list[bytes]:
    """The raw metadata entries of a GGUF whose keys start with `prefix`, to be copied into another one."""
    data = memoryview(path.read_bytes())
    if bytes(data[:4]) != b"GGUF":
        raise ValueError(f"{path}: expected a GGUF file, found {bytes(data[:4])!r} at its start")
    (n_kv,) = struct.unpack_from("<Q", data, 16)
    position, entries = 24, []
    for _ in range(n_kv):
        start = position
        (length,) = struct.unpack_from("<Q", data, position)
        key = bytes(data[position + 8 : position + 8 + length]).decode()
        position += 8 + length
        (kind,) = struct.unpack_from("<I", data, position)
        position = _skip_value(data, position + 4, kind)
        if key.startswith(prefix):
            entries.append(bytes(data[start:position]))
    return entries


def _skip_value(data: memoryview, position: int, kind: int) -> int:
    if kind == STRING:
        (length,) = struct.unpack_from("<Q", data, position)
        return position + 8 + int(length)
    if kind != ARRAY:
        return position + _FIXED_BYTES[kind]
    item, n = struct.unpack_from("<IQ", data, position)
    position += 12
    if item in _FIXED_BYTES:
        return position + int(n) * _FIXED_BYTES[item]
    for _ in range(n):
        position = _skip_value(data, position, item)
    return position


def tokenizer_size(entries: Sequence[bytes]) -> int:
    """Number of tokens in the metadata entries of a tokenizer."""
    head = _string("tokenizer.ggml.tokens") + struct.pack("<II", ARRAY, STRING)
    for entry in entries:
        if entry.startswith(head):
            return int(struct.unpack_from("<Q", entry, len(head))[0])
    raise ValueError("the tokenizer's GGUF has no tokenizer.ggml.tokens: expected one like ggml-vocab-*.gguf")


def _padding(n_bytes: int) -> bytes:
    return bytes(-n_bytes % ALIGNMENT)


def _head(kv: Sequence[bytes], tensors: Sequence[Tensor]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(kv)) + b"".join(kv)
    offset = 0
    for tensor in tensors:
        head += _string(tensor.name) + struct.pack(f"<I{len(tensor.ne)}Q", len(tensor.ne), *tensor.ne)
        head += struct.pack("<IQ", TYPES[tensor.type].id, offset)
        offset += tensor.n_bytes + len(_padding(tensor.n_bytes))
    return head + _padding(len(head))


def _write_file(path: Path, kv: Sequence[bytes], tensors: Sequence[Tensor], seed: int, jobs: int) -> None:
    """Writes beside `path` and renames at the end: a file of this name is always whole."""
    partial = path.with_name(path.name + ".partial")
    head = _head(kv, tensors)
    partial.write_bytes(head)
    places, end = [], len(head)
    for tensor in tensors:
        places.append((tensor, end))
        end += tensor.n_bytes + len(_padding(tensor.n_bytes))
    os.truncate(partial, end)
    if jobs == 1:
        for tensor, offset in places:
            _write_tensor(partial, tensor, offset, seed)
    else:
        with ProcessPoolExecutor(jobs) as pool:  # a tensor's bytes depend on no other tensor
            largest_first = sorted(places, key=lambda place: -place[0].n_bytes)
            for writing in [pool.submit(_write_tensor, partial, *place, seed) for place in largest_first]:
                writing.result()
    partial.replace(path)


def _write_tensor(path: Path, tensor: Tensor, offset: int, seed: int) -> None:
    with path.open("r+b") as out:
        out.seek(offset)
        n_written = sum(out.write(chunk) for chunk in fill(tensor, seed))
    if n_written != tensor.n_bytes:
        raise AssertionError(f"{tensor.name}: wrote {n_written} bytes, expected {tensor.n_bytes}")


def shard_path(path: Path, index: int, n_shards: int) -> Path:
    """NAME.gguf -> NAME-00001-of-0000N.gguf, the name that llama.cpp expects; `index` counts from 0."""
    return path.with_name(f"{path.stem}-{index + 1:05d}-of-{n_shards:05d}.gguf")


def _split(tensors: Sequence[Tensor], n_shards: int) -> Iterator[list[Tensor]]:
    """Consecutive groups of about the same number of bytes, none empty."""
    if not 1 <= n_shards <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors can't be split into {n_shards} shards")
    left, i = sum(t.n_bytes for t in tensors), 0
    for shards_left in range(n_shards, 0, -1):
        group: list[Tensor] = []
        target = left / shards_left
        while i < len(tensors) - (shards_left - 1) and (not group or shards_left == 1 or target > 0):
            group.append(tensors[i])
            target -= tensors[i].n_bytes
            left -= tensors[i].n_bytes
            i += 1
        yield group


def write_gguf(
    path: Path,
    kv: Mapping[str, Any],
    tensors: Sequence[Tensor],
    *,
    seed: int = 1,
    raw_kv: Sequence[bytes] = (),
    n_shards: int = 1,
    jobs: int = 1,
) -> Path:
    """Writes the model with `jobs` processes and returns its first file: `path`, or the first shard beside it."""
    entries = [encode_kv(key, value) for key, value in kv.items()] + list(raw_kv)
    if n_shards == 1:
        _write_file(path, entries, tensors, seed, jobs)
        return path
    for index, group in enumerate(_split(tensors, n_shards)):
        split = {
            "split.no": Typed(U16, index),
            "split.count": Typed(U16, n_shards),
            "split.tensors.count": Typed(I32, len(tensors)),
        }
        marks = [encode_kv(key, value) for key, value in split.items()]
        _write_file(shard_path(path, index, n_shards), (entries if index == 0 else []) + marks, group, seed, jobs)
    return shard_path(path, 0, n_shards)
