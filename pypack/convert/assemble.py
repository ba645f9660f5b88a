"""Puts experts' blocks together from the GGUF, in pieces of bounded size."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..drive.direct_io import aligned_buffer, open_file, read_exact
from ..errors import DirectIOError, ReadError
from ..format.layout import ALIGNMENT, Layer
from ..gguf.model import GGUFModel

Bytes = NDArray[np.uint8]

PIECE_BYTES = 32 << 20  # two experts of a large model: reads of several MiB even where three roles share it


class Chunk(NamedTuple):
    """Work for one thread: some experts of a layer that fit one piece together, or one of any size."""

    layer: Layer
    first_expert: int
    n_experts: int

    @property
    def size_bytes(self) -> int:
        """Bytes of its blocks, padding included."""
        return self.n_experts * self.layer.block_bytes

    @property
    def pack_offset(self) -> int:
        """Where its first block starts in the pack, bytes."""
        return self.layer.data_offset + self.first_expert * self.layer.block_bytes

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(start, stop) in each expert's block, so that a piece of all its experts fits ``PIECE_BYTES``."""
        if self.n_experts > 1:
            yield 0, self.layer.block_bytes
            return
        for start in range(0, self.layer.block_bytes, PIECE_BYTES):
            yield start, min(start + PIECE_BYTES, self.layer.block_bytes)


def plan_chunks(layers: Sequence[Layer]) -> Iterator[Chunk]:
    """All experts of the layers, in the order of the pack."""
    for layer in layers:
        step = max(1, PIECE_BYTES // layer.block_bytes)
        for first in range(0, layer.n_expert, step):
            yield Chunk(layer, first, min(step, layer.n_expert - first))


class Buffers:
    """What one thread needs: a piece of the pack and the aligned range of the GGUF around a part of it."""

    def __init__(self) -> None:
        self.piece: Bytes = np.frombuffer(aligned_buffer(PIECE_BYTES), np.uint8)
        self.scratch = aligned_buffer(PIECE_BYTES + 2 * ALIGNMENT)


class RangeReader:
    """Reads any byte range of a file: directly, or through the page cache where that is impossible. Raises ReadError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd, self.direct = open_file(path), True
        except DirectIOError:
            self._fd, self.direct = open_file(path, direct_io=False), False

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def read(self, offset: int, length: int, scratch: memoryview) -> Bytes:
        """The bytes, as a view into ``scratch``, which must have two ALIGNMENTs to spare."""
        alignment = ALIGNMENT if self.direct else 1
        start = offset // alignment * alignment
        skipped = offset - start
        span = -(-(skipped + length) // alignment) * alignment
        try:
            read_exact(self._fd, scratch[:span], start, n_needed=skipped + length, alignment=alignment)
        except OSError as error:
            if error.errno == errno.EINVAL and alignment > 1:
                self._leave_direct_io()
                return self.read(offset, length, scratch)
            raise ReadError(
                f"{self.path} cannot be read at byte {offset}: {error.strerror}", error.errno or 0
            ) from error
        except ReadError as error:
            raise ReadError(f"{self.path} was cut short while it was read: {error}") from error
        if not self.direct:
            os.posix_fadvise(self._fd, start, span, os.POSIX_FADV_DONTNEED)
        view: Bytes = np.frombuffer(scratch, np.uint8, count=length, offset=skipped)
        return view

    def _leave_direct_io(self) -> None:
        """For a file system that opens with O_DIRECT and gives a page, but no more. Other threads may be reading."""
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False


class BlockSource:
    """The routed experts of a model, as the blocks they form in a pack. Safe to use from several threads.

    Raises ReadError.
    """

    def __init__(self, model: GGUFModel) -> None:
        self._tensors = model.tensors
        self._readers: list[RangeReader] = []
        try:
            for shard in model.shards:
                self._readers.append(RangeReader(shard.path))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BlockSource:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def close(self) -> None:
        """Closes the model's files. Further calls do nothing."""
        for reader in self._readers:
            reader.close()
        self._readers.clear()

    def fill(self, chunk: Chunk, start: int, stop: int, buffers: Buffers) -> Bytes:
        """Bytes ``start`` to ``stop`` of the chunk's blocks: [n_experts, stop - start], in ``buffers``."""
        n = chunk.n_experts
        out = buffers.piece[: n * (stop - start)].reshape(n, stop - start)
        position = start
        for role in chunk.layer.roles:
            lo, hi = max(start, role.offset), min(stop, role.offset + role.bytes)
            if lo >= hi:
                continue
            out[:, position - start : lo - start] = 0
            tensor = self._tensors[role.tensor]
            offset = tensor.offset + chunk.first_expert * role.bytes + lo - role.offset
            data = self._readers[tensor.file_id].read(offset, n * (hi - lo), buffers.scratch)
            out[:, lo - start : hi - start] = data.reshape(n, hi - lo)
            position = hi
        out[:, position - start :] = 0
        return out
