"""Writes GGUFs byte by byte, so that tests can get every single field wrong.

    GGUF(kv=[text("general.architecture", "test")], tensors=[T("blk.0.ffn_up_exps.weight", (64, 32, 4))])

Fields left at None are filled in as a correct writer would.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from llama_expert_pack.pypack.ggml_types import GGML_TYPES

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "?",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def string(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def kv(key: str | bytes, type_id: int, value: int | float | str) -> bytes:
    """A metadata entry of a scalar type."""
    data = string(value) if isinstance(value, str) else struct.pack("<" + _FORMATS[type_id], value)
    return string(key) + struct.pack("<I", type_id) + data


def text(key: str, value: str) -> bytes:
    return kv(key, STRING, value)


def array(key: str, type_id: int, values: Sequence[int | float | str]) -> bytes:
    """A metadata entry that is an array."""
    if type_id == STRING:
        data = b"".join(string(str(v)) for v in values)
    else:
        data = struct.pack(f"<{len(values)}{_FORMATS[type_id]}", *values)
    return string(key) + struct.pack("<IIQ", ARRAY, type_id, len(values)) + data


@dataclass
class T:
    """A tensor; ``offset`` None: behind the one before. ``data`` None: made of ``seed`` and the name."""

    name: str | bytes
    ne: Sequence[int]
    type: int = 0
    offset: int | None = None
    data: bytes | None = None
    seed: int = 0

    @property
    def size_bytes(self) -> int:
        traits = GGML_TYPES[self.type]
        return self.ne[0] // traits.block_values * traits.block_bytes * prod(self.ne[1:])

    def bytes(self) -> bytes:
        if self.data is not None:
            return self.data
        name = self.name.encode() if isinstance(self.name, str) else self.name
        rng = np.random.default_rng([self.seed, *name])
        return rng.integers(0, 256, self.size_bytes, np.uint8).tobytes()


@dataclass
class GGUF:
    """A whole file."""

    kv: Sequence[bytes] = ()
    tensors: Sequence[T] = ()
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_kv: int | None = None
    alignment: int = 32
    trailing: bytes = b""
    order: str = field(default="<")

    def head(self) -> bytes:
        """Header, metadata and tensor table."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_kv = len(self.kv) if self.n_kv is None else self.n_kv
        out = self.magic + struct.pack(self.order + "IQQ", self.version, n_tensors, n_kv) + b"".join(self.kv)
        offset = 0
        for tensor in self.tensors:
            place = offset if tensor.offset is None else tensor.offset
            out += string(tensor.name) + struct.pack(f"<I{len(tensor.ne)}q", len(tensor.ne), *tensor.ne)
            out += struct.pack("<iQ", tensor.type, place)
            if tensor.type in GGML_TYPES and min(tensor.ne, default=0) > 0:
                offset = _pad(place + tensor.size_bytes, self.alignment)
        return out

    def build(self) -> bytes:
        out = bytearray(self.head())
        out += bytes(_pad(len(out), self.alignment) - len(out))
        for tensor in self.tensors:
            data = tensor.bytes()
            out += data + bytes(_pad(len(data), self.alignment) - len(data))
        return bytes(out) + self.trailing

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


def _pad(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def facts(architecture: str = "test", n_expert: int = 4, top_k: int = 2, n_block: int = 2) -> list[bytes]:
    """The metadata that a mixture-of-experts model has at least."""
    return [
        text("general.architecture", architecture),
        text("general.name", "Tiny Test"),
        kv(f"{architecture}.block_count", U32, n_block),
        kv(f"{architecture}.expert_count", U32, n_expert),
        kv(f"{architecture}.expert_used_count", U32, top_k),
    ]


def moe_tensors(
    block: int,
    n_expert: int = 4,
    n_embd: int = 64,
    n_ff: int = 32,
    types: Sequence[int] = (0, 0, 0),
    seed: int = 0,
) -> list[T]:
    """Router and the three roles of one block."""
    gate, up, down = types
    prefix = f"blk.{block}.ffn_"
    return [
        T(prefix + "gate_inp.weight", (n_embd, n_expert), seed=seed),
        T(prefix + "gate_exps.weight", (n_embd, n_ff, n_expert), gate, seed=seed),
        T(prefix + "up_exps.weight", (n_embd, n_ff, n_expert), up, seed=seed),
        T(prefix + "down_exps.weight", (n_ff, n_embd, n_expert), down, seed=seed),
    ]


def tiny_moe(seed: int = 0, n_block: int = 2, n_expert: int = 4, n_embd: int = 64, n_ff: int = 32) -> GGUF:
    """A small uniform model: ``n_block`` blocks of F32 experts behind an embedding."""
    tensors = [T("token_embd.weight", (n_embd, 8), seed=seed)]
    for block in range(n_block):
        tensors += moe_tensors(block, n_expert, n_embd, n_ff, seed=seed)
    return GGUF(facts(n_expert=n_expert, n_block=n_block), tensors)


def split(model: GGUF, first_counts: Sequence[int], folder: Path, name: str = "model") -> list[Path]:
    """Writes a model as shards with the given numbers of tensors; returns their paths."""
    assert sum(first_counts) == len(model.tensors)
    paths = []
    start = 0
    for no, n in enumerate(first_counts):
        keys = split_keys(no, len(first_counts), len(model.tensors))
        shard = GGUF([*(model.kv if no == 0 else ()), *keys], model.tensors[start : start + n])
        paths.append(shard.write(folder / f"{name}-{no + 1:05d}-of-{len(first_counts):05d}.gguf"))
        start += n
    return paths


def split_keys(no: int, count: int, n_tensors: int) -> list[bytes]:
    return [
        kv("split.no", U16, no),
        kv("split.count", U16, count),
        kv("split.tensors.count", I32, n_tensors),
    ]
