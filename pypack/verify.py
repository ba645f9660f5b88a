"""Checks a pack: its structure always, every block's hash and its source when asked."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import xxhash

from pypack.assemble import BlockSource, Buffers, Chunk, RangeReader, plan_chunks
from pypack.convert import DEFAULT_JOBS
from pypack.errors import PackError, SourceMismatchError
from pypack.gguf_source import read_model
from pypack.pack import Pack, open_pack
from pypack.progress import Progress, Silent


@dataclass(frozen=True)
class Verification:
    """What was checked and found right."""

    n_layers: int
    n_experts: int
    hashed_bytes: int
    source_checked: bool

    def __str__(self) -> str:
        hashed = f"{self.hashed_bytes} bytes hashed" if self.hashed_bytes else "structure checked, blocks not read"
        source = ", made from the given model" if self.source_checked else ""
        return f"{self.n_layers} layers, {self.n_experts} experts, {hashed}{source}"


def verify(
    pack_path: str | os.PathLike[str],
    *,
    deep: bool = False,
    source: str | os.PathLike[str] | None = None,
    jobs: int = DEFAULT_JOBS,
    progress: Progress | None = None,
) -> Verification:
    """Checks a pack; raises the ExpertPackError that says what is wrong with it.

    Args:
        deep: read every block and compare its hash with the index.
        source: model that the pack must belong to; with ``deep``, its bytes must be those of the pack.
    """
    pack = open_pack(pack_path)
    if source is not None:
        pack.check_source(source)
    if deep:
        _verify_blocks(pack, source, jobs, progress or Silent())
    return Verification(len(pack.layers), pack.n_keys, pack.payload_bytes if deep else 0, source is not None)


def _verify_blocks(pack: Pack, source: str | os.PathLike[str] | None, jobs: int, progress: Progress) -> None:
    with ExitStack() as stack:
        model = stack.enter_context(BlockSource(read_model(source))) if source is not None else None
        reader = RangeReader(pack.path)
        stack.callback(reader.close)
        checker = _Checker(pack, reader, model, Path(source) if source is not None else None)
        progress.start(pack.payload_bytes, 0)
        stack.callback(progress.close)
        pool = ThreadPoolExecutor(jobs, thread_name_prefix="verify")
        pending: deque[tuple[Chunk, Future[None]]] = deque()
        try:
            for chunk in plan_chunks(pack.layers):
                pending.append((chunk, pool.submit(checker.check, chunk)))
                if len(pending) >= 4 * jobs:
                    _collect(pending, progress)
            while pending:
                _collect(pending, progress)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _collect(pending: deque[tuple[Chunk, Future[None]]], progress: Progress) -> None:
    chunk, future = pending.popleft()
    future.result()
    progress.advance(chunk.size_bytes)


class _Checker:
    """Hashes chunks of the pack, and of the model if there is one, from the threads of a pool."""

    def __init__(self, pack: Pack, reader: RangeReader, model: BlockSource | None, source: Path | None) -> None:
        self._pack, self._reader, self._model, self._source = pack, reader, model, source
        self._local = threading.local()

    def check(self, chunk: Chunk) -> None:
        buffers: Buffers | None = getattr(self._local, "buffers", None)
        if buffers is None:
            buffers = self._local.buffers = Buffers()
        self._compare(chunk, self._hash_pack(chunk, buffers), self._pack.path)
        if self._model is not None:
            self._compare(chunk, self._hash_model(chunk, buffers, self._model), self._source)

    def _hash_pack(self, chunk: Chunk, buffers: Buffers) -> list[bytes]:
        n = chunk.n_experts
        hashes = [xxhash.xxh3_128() for _ in range(n)]
        for start, stop in chunk.pieces():
            data = self._reader.read(chunk.pack_offset + start, n * (stop - start), buffers.scratch)
            for hash_, rows in zip(hashes, data.reshape(n, stop - start), strict=True):
                hash_.update(rows.data)
        return [hash_.digest() for hash_ in hashes]

    def _hash_model(self, chunk: Chunk, buffers: Buffers, model: BlockSource) -> list[bytes]:
        hashes = [xxhash.xxh3_128() for _ in range(chunk.n_experts)]
        for start, stop in chunk.pieces():
            for hash_, rows in zip(hashes, model.fill(chunk, start, stop, buffers), strict=True):
                hash_.update(rows.data)
        return [hash_.digest() for hash_ in hashes]

    def _compare(self, chunk: Chunk, digests: list[bytes], path: Path | None) -> None:
        for expert, digest in enumerate(digests, start=chunk.first_expert):
            expected = self._pack.digest(chunk.layer.index, expert)
            if digest != expected:
                where = f"expert {expert} of layer {chunk.layer.index} (blk.{chunk.layer.block})"
                if path != self._pack.path:
                    raise SourceMismatchError(
                        f"{self._pack.path}: {where} differs from that in {path}: convert the model again with --force"
                    )
                raise PackError(
                    f"{path}: {where} is damaged (xxh3_128 {digest.hex()} instead of {expected.hex()}): "
                    "convert the model again with --force"
                )
