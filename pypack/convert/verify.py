"""Checks a pack: its structure always, every block's hash and its source when asked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..errors import PackError, SourceMismatchError, UsageError
from ..format.pack import Pack, open_pack
from ..gguf.model import read_model
from ..source.match import check_source
from ..source.samples import hole_in_experts
from ..system.os_errors import os_errors
from .assemble import BlockSource, Buffers, Bytes, Chunk, RangeReader, plan_chunks
from .progress import Progress, Silent
from .workers import check_jobs, map_in_order


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
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Checks a pack; raises the ExpertPackError that says what is wrong with it.

    Args:
        deep: read every block and compare its hash with the index.
        source: model that the pack must belong to; with ``deep``, its bytes must be those of the pack.
        jobs: threads that read and hash; default: as many as memory allows, up to 4.
    """
    jobs = check_jobs(jobs)
    pack = open_pack(pack_path)
    if source is not None:
        check_source(pack, source, sample_experts=not deep)
    if deep:
        with os_errors(pack.path):
            _verify_blocks(pack, source, jobs, progress or Silent())
    return Verification(len(pack.layers), pack.n_keys, pack.payload_bytes if deep else 0, source is not None)


def _verify_blocks(pack: Pack, source: str | os.PathLike[str] | None, jobs: int, progress: Progress) -> None:
    with ExitStack() as stack:
        model = None
        if source is not None:
            found = read_model(source)
            hole = hole_in_experts(found, pack.layers)
            if hole:
                raise SourceMismatchError(
                    f"{hole}: its experts are not there and can't be compared; verify the pack without --source, and keep it"
                )
            model = stack.enter_context(BlockSource(found))
        reader = RangeReader(pack.path)
        stack.callback(reader.close)
        checker = _Checker(pack, reader, model, Path(source) if source is not None else None)
        progress.start(pack.payload_bytes, 0)
        stack.callback(progress.close)
        checked = stack.enter_context(
            closing(map_in_order(checker.check, plan_chunks(pack.layers), jobs, checker.stop))
        )
        for chunk, _ in checked:
            progress.advance(chunk.size_bytes)


class _Checker:
    """Hashes chunks of the pack, and of the model if there is one, from the threads of a pool."""

    def __init__(self, pack: Pack, reader: RangeReader, model: BlockSource | None, source: Path | None) -> None:
        self._pack, self._reader, self._model, self._source = pack, reader, model, source
        self._local = threading.local()
        self.stop = threading.Event()

    def check(self, chunk: Chunk) -> None:
        buffers: Buffers | None = getattr(self._local, "buffers", None)
        if buffers is None:
            buffers = self._local.buffers = Buffers()
        reader, model, n = self._reader, self._model, chunk.n_experts

        def from_pack(start: int, stop: int) -> Bytes:
            data = reader.read(chunk.pack_offset + start, n * (stop - start), buffers.scratch)
            return data.reshape(n, stop - start)

        self._compare(chunk, self._digests(chunk, from_pack), self._pack.path)
        if model is not None:
            digests = self._digests(chunk, lambda start, stop: model.fill(chunk, start, stop, buffers))
            self._compare(chunk, digests, self._source)

    def _digests(self, chunk: Chunk, read: Callable[[int, int], Bytes]) -> list[bytes]:
        hashes = [xxhash.xxh3_128() for _ in range(chunk.n_experts)]
        for start, stop in chunk.pieces():
            if self.stop.is_set():
                raise UsageError("the verification was stopped")
            for hash_, rows in zip(hashes, read(start, stop), strict=True):
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
