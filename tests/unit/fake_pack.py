"""Packs and layers small enough to write by hand in a test."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from llama_expert_pack.pypack.format.layout import Extent, Layer


def make_layers(shapes: Sequence[tuple[int, int]]) -> list[Layer]:
    """Layers from (n_expert, block_bytes)."""
    layers: list[Layer] = []
    first_key = 0
    for index, (n_expert, block_bytes) in enumerate(shapes):
        layers.append(Layer(index, index, "exps", n_expert, first_key, block_bytes, ()))
        first_key += n_expert
    return layers


class FakePack:
    """A file of random blocks. ``pieces``: (length, dest_offset) of each expert's extents."""

    def __init__(
        self,
        path: Path,
        n_expert: int,
        block_bytes: int,
        pieces: Sequence[tuple[int, int]] | None = None,
        start: int = 0,
    ) -> None:
        self.files = [path]
        self.layers = make_layers([(n_expert, block_bytes)])
        self.blocks: list[bytes] = []
        self._extents: list[tuple[Extent, ...]] = []
        contents = bytearray(os.urandom(start))
        for _ in range(n_expert):
            block = bytearray(block_bytes)
            extents = []
            for length, dest_offset in pieces or [(block_bytes, 0)]:
                data = os.urandom(length)
                block[dest_offset : dest_offset + length] = data
                extents.append(Extent(0, len(contents), length, dest_offset))
                contents += data
            self.blocks.append(bytes(block))
            self._extents.append(tuple(extents))
        path.write_bytes(contents)

    def extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        assert layer == 0
        return self._extents[expert]

    def digest(self, layer: int, expert: int) -> bytes:
        return xxhash.xxh3_128_digest(self.blocks[expert])


def n_open_files() -> int:
    """Of this process; the one that lists them included."""
    return len(list(Path("/proc/self/fd").iterdir()))
