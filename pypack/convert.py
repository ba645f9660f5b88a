"""Makes a pack from a GGUF: streamed, resumable, atomic.

    NAME.expert-pack.partial         blocks and index entries, layer by layer; its header stays zero till then
    NAME.expert-pack.partial.json    journal: layers that are safely on the disk
    NAME.expert-pack                 the partial pack, renamed once all of it and its header are synced
    NAME.expert-pack.manifest.json   written last: without it nothing accepts the pack

What decides the result (the *plan*: the manifest before the header exists) is hashed into the journal, so
that a run resumes only what it would itself have written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from pypack.assemble import BlockSource, Buffers, Chunk, plan_chunks
from pypack.discover import find_layers
from pypack.errors import PackError, SourceMismatchError, SpaceError, UsageError
from pypack.fingerprint import model_facts, source_difference, source_fingerprint
from pypack.gguf_source import GGUFModel, read_model
from pypack.journal import FORMAT as JOURNAL_FORMAT
from pypack.journal import Journal, read_journal, remove, sync_folder, write_atomically
from pypack.layout import ALIGNMENT, Layer, payload_bytes
from pypack.manifest import (
    BUILDER,
    FORMAT,
    Manifest,
    PackFile,
    canonical_sha256,
    encode_manifest,
    is_plain_name,
)
from pypack.pack import PACK_SUFFIX, manifest_path, open_pack, pack_path_for
from pypack.pack_format import ENTRY, HEADER_BYTES, VERSION, Index, make_header, make_index
from pypack.partial_pack import PartialPack, write_error
from pypack.progress import Progress, Silent
from pypack.workers import DEFAULT_JOBS, check_jobs, map_in_order

DEFAULT_SAFETY_MARGIN_BYTES = 1 << 30
# Every sync makes the drive empty its cache; a kill costs at most this and the layer in work.
CHECKPOINT_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` did. ``reused``: the pack was there; ``resumed_layers``: already done before."""

    path: Path
    pack_bytes: int
    reused: bool
    resumed_layers: int


def convert(
    model_path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    jobs: int = DEFAULT_JOBS,
    safety_margin_bytes: int = DEFAULT_SAFETY_MARGIN_BYTES,
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Writes the pack of the model whose only or first file is ``model_path``.

    Args:
        output: the pack (ending in .expert-pack) or an existing folder; default: beside the model.
        jobs: threads, each with one read or write of up to 32 MiB in flight.
        safety_margin_bytes: free space that must remain on the disk.
        force: write the pack anew even if there is one, and replace it.
        restart: throw away what an interrupted conversion has written.

    Raises ExpertPackError. On KeyboardInterrupt and most errors the finished layers stay for the next call.
    """
    check_jobs(jobs)
    model = read_model(model_path)
    layers = find_layers(model)
    path = _output_path(model, output)
    plan = _make_plan(model, layers, path)
    reused = Conversion(path, plan.files[0].size_bytes, reused=True, resumed_layers=0)
    if not force and _is_finished(path, plan):
        _remove_stale_journal(path)
        return reused
    _check_folder(path.parent)
    with PartialPack(_partial_path(path)) as partial:
        # Again, now that no other conversion can be finishing it.
        if not force and (_is_finished(path, plan) or _finish_published(path, plan)):
            return reused
        run = _Run(model, plan, path, partial, progress or Silent())
        run.prepare(restart, safety_margin_bytes)
        resumed_layers = run.layers_done
        run.write_layers(jobs)
        run.publish()
    return Conversion(path, plan.files[0].size_bytes, reused=False, resumed_layers=resumed_layers)


class _Run:
    """One conversion that holds the lock of its partial pack."""

    def __init__(self, model: GGUFModel, plan: Manifest, path: Path, partial: PartialPack, progress: Progress) -> None:
        self.model, self.plan, self.path, self.partial, self.progress = model, plan, path, partial, progress
        self.plan_sha256 = canonical_sha256(plan)
        self.stamp = _source_stamp(model)
        self.index: Index = make_index(plan.layers)
        self.layers_done = 0
        self.checkpoint_s = time.monotonic()

    def prepare(self, restart: bool, safety_margin_bytes: int) -> None:
        """Takes over what an earlier run has written, or clears it; makes sure the rest fits the disk."""
        journal_path = _journal_path(self.path)
        journal = None if restart else read_journal(journal_path)
        if journal is None or self.partial.size_bytes == 0:
            remove(journal_path)
            self.partial.clear()
        else:
            self._resume(journal)
        size_bytes = self.plan.files[0].size_bytes
        _check_space(self.path, size_bytes - self.partial.allocated_bytes, safety_margin_bytes)
        self.partial.reserve(size_bytes)

    def _resume(self, journal: Journal) -> None:
        if journal.plan_sha256 != self.plan_sha256.hex() or journal.source_sha256 != self.stamp:
            what = "the model has" if journal.source_sha256 != self.stamp else "the options or this package have"
            raise SourceMismatchError(
                f"{self.partial.path} cannot be resumed: {what} changed since; use --restart to begin again"
            )
        layers = self.plan.layers
        done = journal.layers_done
        n_keys = layers[done].first_key if done < len(layers) else len(self.index)
        data = self.partial.read_index(n_keys) if done <= len(layers) else b""
        if (
            self.partial.size_bytes != self.plan.files[0].size_bytes
            or hashlib.sha256(data).hexdigest() != journal.index_sha256
        ):
            raise PackError(f"{self.partial.path} is damaged and cannot be resumed: use --restart to begin again")
        self.index[:n_keys] = np.frombuffer(data, ENTRY)
        self.layers_done = done

    def write_layers(self, jobs: int) -> None:
        """Writes the blocks of all layers that are not done yet, several chunks at a time."""
        layers = self.plan.layers[self.layers_done :]
        self.progress.start(payload_bytes(self.plan.layers), payload_bytes(self.plan.layers[: self.layers_done]))
        try:
            with BlockSource(self.model) as source:
                writer = _ChunkWriter(source, self.partial)
                with closing(map_in_order(writer.write, plan_chunks(layers), jobs, writer.stop)) as written:
                    for chunk, digests in written:
                        self._note(chunk, digests)
        finally:
            self.progress.close()

    def _note(self, chunk: Chunk, digests: list[bytes]) -> None:
        """A chunk is written. Chunks come in order, so the last one of a layer completes the layer."""
        first = chunk.layer.first_key + chunk.first_expert
        rows = self.index["digest"][first : first + chunk.n_experts]
        rows[:] = np.frombuffer(b"".join(digests), np.uint8).reshape(rows.shape)
        self.progress.advance(chunk.size_bytes)
        if chunk.first_expert + chunk.n_experts == chunk.layer.n_expert:
            is_last = chunk.layer.index == len(self.plan.layers) - 1
            if is_last or time.monotonic() - self.checkpoint_s >= CHECKPOINT_INTERVAL_S:
                self._checkpoint(chunk.layer)

    def _checkpoint(self, layer: Layer) -> None:
        """Makes all layers up to this one safe, then says so in the journal."""
        start = self.plan.layers[self.layers_done].first_key
        end = layer.first_key + layer.n_expert
        self.partial.write_index(self.index[start:end], start)
        self.partial.sync()
        self.layers_done = layer.index + 1
        self._write_journal(hashlib.sha256(self.index[:end].tobytes()).hexdigest())
        self.checkpoint_s = time.monotonic()

    def _write_journal(self, index_sha256: str) -> None:
        journal = Journal(JOURNAL_FORMAT, self.plan_sha256.hex(), self.stamp, self.layers_done, index_sha256)
        path = _journal_path(self.path)
        try:
            write_atomically(path, msgspec.json.encode(journal))
        except OSError as error:
            raise write_error(path, error, kept=True) from error

    def publish(self) -> None:
        """Turns the complete partial pack into the finished one."""
        if _source_stamp(self.model) != self.stamp:
            raise SourceMismatchError(
                f"{self.model.path} changed while it was converted: use --restart once it stays as it is"
            )
        header = make_header(self.plan.layers, self.index.tobytes(), self.plan_sha256)
        page = header.encode()
        assert self.partial.read_index(len(self.index)) == self.index.tobytes()
        self.partial.write_header(page)
        self.partial.sync()
        try:
            remove(manifest_path(self.path))  # with force: of the pack that is now replaced
            sync_folder(self.path.parent)
            self.partial.path.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise write_error(self.path, error, kept=True) from error
        _write_manifest(self.path, self.plan, page)


class _ChunkWriter:
    """Reads, hashes and writes chunks, from the threads of a pool."""

    def __init__(self, source: BlockSource, partial: PartialPack) -> None:
        self._source, self._partial = source, partial
        self._local = threading.local()
        self.stop = threading.Event()

    def write(self, chunk: Chunk) -> list[bytes]:
        """Writes the chunk's blocks; returns their digests."""
        buffers: Buffers | None = getattr(self._local, "buffers", None)
        if buffers is None:
            buffers = self._local.buffers = Buffers()
        hashes = [xxhash.xxh3_128() for _ in range(chunk.n_experts)]
        for start, stop in chunk.pieces():
            if self.stop.is_set():
                raise UsageError("the conversion was stopped")
            piece = self._source.fill(chunk, start, stop, buffers)
            for hash_, rows in zip(hashes, piece, strict=True):
                hash_.update(rows.data)
            self._partial.write_blocks(piece.reshape(-1), chunk.pack_offset + start)
        return [hash_.digest() for hash_ in hashes]


def _output_path(model: GGUFModel, output: str | os.PathLike[str] | None) -> Path:
    if output is None:
        return pack_path_for(model.path)
    path = Path(output)
    if path.is_dir():
        return path / pack_path_for(model.path).name
    if path.suffix != PACK_SUFFIX or path.name == PACK_SUFFIX:
        raise UsageError(f"output {path} must end in {PACK_SUFFIX} or be an existing folder")
    return path


def _partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _journal_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial.json")


def _make_plan(model: GGUFModel, layers: list[Layer], path: Path) -> Manifest:
    for name in (path.name, *(shard.name for shard in model.shards)):
        if not is_plain_name(name):
            raise UsageError(f"file name {name!r} cannot be written into a manifest: rename the file")
    last = layers[-1]
    end = last.data_offset + last.n_expert * last.block_bytes
    return Manifest(
        format=FORMAT,
        version=VERSION,
        complete=True,
        alignment=ALIGNMENT,
        files=(PackFile(path.name, end),),
        source=source_fingerprint(model),
        model=model_facts(model),
        layers=tuple(layers),
        builder=BUILDER,
        header_sha256="",
    )


def _source_stamp(model: GGUFModel) -> str:
    """Changes when any shard is written to, even where the fingerprint does not look."""
    sha = hashlib.sha256()
    for shard in model.shards:
        info = shard.path.stat()
        sha.update(f"{shard.head_sha256} {info.st_size} {info.st_mtime_ns}\n".encode())
    return sha.hexdigest()


def _is_finished(path: Path, plan: Manifest) -> bool:
    """Whether the finished pack of this model is already there. Raises if something else is."""
    if not path.exists():
        return False
    if not manifest_path(path).exists() and _journal_path(path).exists():
        return False  # interrupted between the last two steps: _finish_published() decides
    try:
        pack = open_pack(path)
    except PackError as error:
        raise UsageError(
            f"{path} is in the way and is no finished pack ({error}): use --force to replace it"
        ) from error
    difference = source_difference(pack.manifest.source, plan.source)
    if difference is None and pack.manifest.layers != plan.layers:
        difference = "its layers are not those of the model"
    if difference:
        raise SourceMismatchError(
            f"{path} is the pack of another model ({difference}): use --force to replace it, or another --output"
        )
    return True


def _remove_stale_journal(path: Path) -> None:
    """Of a run that was stopped between writing the manifest and this, its last step."""
    if not _partial_path(path).exists():
        with contextlib.suppress(OSError):
            remove(_journal_path(path))


def _finish_published(path: Path, plan: Manifest) -> bool:
    """Writes the manifest of a pack that was renamed but whose run was stopped before the manifest."""
    if not path.exists():
        return False
    journal = read_journal(_journal_path(path))
    with open(path, "rb", buffering=0) as file:
        page = os.pread(file.fileno(), HEADER_BYTES, 0)
        index = os.pread(file.fileno(), len(make_index(plan.layers)) * ENTRY.itemsize, HEADER_BYTES)
    complete = (
        journal is not None
        and journal.layers_done == len(plan.layers)
        and hashlib.sha256(index).hexdigest() == journal.index_sha256
        and page == make_header(plan.layers, index, canonical_sha256(plan)).encode()
        and path.stat().st_size == plan.files[0].size_bytes
    )
    if not complete:
        raise UsageError(f"{path} is in the way and has no manifest: use --force to replace it")
    _write_manifest(path, plan, page)
    return True


def _write_manifest(path: Path, plan: Manifest, header_page: bytes) -> None:
    """The last step: from here on the pack is accepted. Then the journal can go."""
    manifest = msgspec.structs.replace(plan, header_sha256=hashlib.sha256(header_page).hexdigest())
    try:
        write_atomically(manifest_path(path), encode_manifest(manifest))
        remove(_journal_path(path))
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(manifest_path(path), error, kept=True) from error


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(f"folder {folder} does not exist: make it, or choose another --output")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"folder {folder} is read-only: choose a folder you may write to with --output")


def _check_space(path: Path, needed_bytes: int, safety_margin_bytes: int) -> None:
    stats = os.statvfs(path.parent)
    free_bytes = stats.f_bavail * stats.f_frsize
    if stats.f_blocks == 0:  # as on ramfs: it does not say
        return
    if needed_bytes > 0 and needed_bytes + safety_margin_bytes > free_bytes:
        gib = 1 << 30
        raise SpaceError(
            f"{path.parent} has {free_bytes / gib:.2f} GiB free, but {path.name} needs "
            f"{needed_bytes / gib:.2f} GiB more and a margin of {safety_margin_bytes / gib:.2f} GiB: "
            "free some space, choose another --output, or lower --safety-margin-gib"
        )
