"""Packs and layers small enough to write by hand in a test."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import xxhash

from llama_expert_pack.pypack.format.header import Header, make_index
from llama_expert_pack.pypack.format.layout import Layer
from llama_expert_pack.pypack.format.manifest import Manifest
from llama_expert_pack.pypack.format.pack import Pack


def make_layers(shapes: Sequence[tuple[int, int]]) -> list[Layer]:
    """Layers from (n_expert, block_bytes)."""
    layers: list[Layer] = []
    first_key = 0
    for index, (n_expert, block_bytes) in enumerate(shapes):
        layers.append(Layer(index, index, "exps", n_expert, first_key, block_bytes, ()))
        first_key += n_expert
    return layers


@dataclass(frozen=True)
class FakePack(Pack):
    blocks: list[bytes]


def fake_pack(path: Path, n_expert: int, block_bytes: int) -> FakePack:
    """A file of random blocks, those of one layer."""
    layers = make_layers([(n_expert, block_bytes)])
    blocks = [os.urandom(block_bytes) for _ in range(n_expert)]
    path.write_bytes(b"".join(blocks))
    index = make_index(layers)
    for entry, block in zip(index, blocks, strict=True):
        entry["digest"] = np.frombuffer(xxhash.xxh3_128_digest(block), np.uint8)
    manifest, header = SimpleNamespace(layers=layers), None
    return FakePack(path, cast(Manifest, manifest), cast(Header, header), index, blocks)


def n_open_files() -> int:
    """Of this process; the one that lists them included."""
    return len(list(Path("/proc/self/fd").iterdir()))
