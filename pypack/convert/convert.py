"""Makes a pack from a GGUF: streamed, resumable, atomic.

    NAME.expert-pack.partial         blocks and index entries, layer by layer; its header stays zero till then
    NAME.expert-pack.partial.json    journal: layers that are safely on the disk
    NAME.expert-pack                 the partial pack, renamed once all of it and its header are synced
    NAME.expert-pack.manifest.json   written last: without it nothing accepts the pack

What decides the result (the *plan*: the manifest before the header exists) is hashed into the journal, so
that a run resumes only what it would itself have written. Before anything is published, the reader's own code must
open it, and samples of its experts must be the model's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from ..errors import GGUFError, PackError, SourceMismatchError, UsageError
from ..format.header import ENTRY, HEADER_BYTES, VERSION, Index, make_header, make_index
from ..format.layout import ALIGNMENT, Layer, payload_bytes
from ..format.manifest import (
    BUILDER,
    FORMAT,
    Manifest,
    PackFile,
    canonical_sha256,
    encode_manifest,
    is_plain_name,
    unreadable,
)
from ..format.pack import Pack, check_pack, manifest_path, open_pack
from ..gguf.model import GGUFModel, read_model
from ..source.discover import find_layers
from ..source.fingerprint import model_facts, source_fingerprint
from ..source.match import difference_to_model
from ..source.samples import expert_difference, hole_in_experts
from ..system.os_errors import os_errors
from ..system.regular_file import open_regular
from .assemble import BlockSource, Buffers, Chunk, plan_chunks
from .journal import FORMAT as JOURNAL_FORMAT
from .journal import Journal, read_journal, remove, sync_folder, write_atomically
from .pack_output import PackOutput
from .partial_pack import PartialPack, write_error
from .progress import Progress, Silent
from .workers import check_jobs, map_in_order

DEFAULT_SAFETY_MARGIN_BYTES = 1 << 30
# Every sync makes the drive empty its cache; a kill costs at most this and the layer in work.
CHECKPOINT_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` did. ``reused``: the pack was there; ``resumed_layers``: already done before.

    ``leftover``: beside a pack that was there, what a run with ``force`` has written that was stopped.
    """

    path: Path
    pack_bytes: int
    reused: bool
    resumed_layers: int
    leftover: Path | None = None


def convert(
    model_path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    jobs: int | None = None,
    safety_margin_bytes: int = DEFAULT_SAFETY_MARGIN_BYTES,
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Writes the pack of the model whose only or first file is ``model_path``.

    Args:
        output: the pack (ending in .expert-pack) or an existing folder; default: beside the model.
        jobs: threads, each with one read or write of up to 32 MiB in flight. Default: as many as memory allows, up to 4.
        safety_margin_bytes: free space that must remain on the disk.
        force: write the pack anew even if there is one, and replace it.
        restart: throw away what an interrupted conversion has written.

    Raises ExpertPackError. On KeyboardInterrupt and most errors the finished layers stay for the next call.
    """
    jobs = check_jobs(jobs)
    model = read_model(model_path)
    with os_errors(model.path):
        out = PackOutput(model, output)
        plan = _make_plan(model, find_layers(model), out)
        reused = Conversion(out.given, plan.files[0].size_bytes, reused=True, resumed_layers=0)
        if not force and _is_finished(out, model, plan):
            return replace(reused, leftover=_leftover(out, restart))
        out.check_writable()
        hole = hole_in_experts(model, list(plan.layers))
        if hole:
            raise GGUFError(
                f"{hole}: its experts were punched out, or it was not downloaded completely; convert a whole copy of the model"
            )
        with PartialPack(out.partial, out.guard) as partial:
            # Again, now that no other conversion can be finishing it.
            if not force and (_is_finished(out, model, plan) or _finish_published(out, model, plan)):
                return reused
            run = _Run(model, plan, out, partial, progress or Silent())
            run.prepare(restart, safety_margin_bytes)
            resumed_layers = run.layers_done
            run.write_layers(jobs)
            run.publish()
    return Conversion(out.given, plan.files[0].size_bytes, reused=False, resumed_layers=resumed_layers)


class _Run:
    """One conversion that holds the lock of its partial pack."""

    def __init__(
        self, model: GGUFModel, plan: Manifest, out: PackOutput, partial: PartialPack, progress: Progress
    ) -> None:
        self.model, self.plan, self.out, self.partial, self.progress = model, plan, out, partial, progress
        self.plan_sha256 = canonical_sha256(plan)
        self.stamp = _source_stamp(model)
        self.index: Index = make_index(plan.layers)
        self.layers_done = 0
        self.checkpoint_s = time.monotonic()

    def prepare(self, restart: bool, safety_margin_bytes: int) -> None:
        """Takes over what an earlier run has written, or clears it; makes sure the rest fits the disk."""
        journal = None if restart else read_journal(self.out.journal)
        if journal is None or self.partial.size_bytes == 0:
            remove(self.out.journal)
            self.partial.clear()
        else:
            self._resume(journal)
        size_bytes = self.plan.files[0].size_bytes
        self.out.check_space(size_bytes - self.partial.allocated_bytes, safety_margin_bytes)
        self.partial.reserve(size_bytes)

    def _resume(self, journal: Journal) -> None:
        if journal.plan_sha256 != self.plan_sha256.hex() or journal.source_sha256 != self.stamp:
            what = "the model has" if journal.source_sha256 != self.stamp else "the options or this package have"
            raise SourceMismatchError(
                f"{self.partial.path} cannot be resumed: {what} changed since; use --restart to begin again"
            )
        layers, done = self.plan.layers, journal.layers_done
        n_keys = sum(layer.n_expert for layer in layers[:done])
        data = self.partial.read_index(n_keys)
        if (
            done > len(layers)
            or self.partial.size_bytes != self.plan.files[0].size_bytes
            or hashlib.sha256(data).hexdigest() != journal.index_sha256
            or not self._take_index(np.frombuffer(data, ENTRY))
        ):
            raise PackError(f"{self.partial.path} is damaged and cannot be resumed: use --restart to begin again")
        changed = expert_difference(self.model, layers[:done], self.partial.path)
        if changed:
            raise SourceMismatchError(
                f"{self.partial.path} cannot be resumed, the model has changed since ({changed}); "
                "use --restart to begin again"
            )
        self.layers_done = done

    def _take_index(self, entries: Index) -> bool:
        """Takes over the entries of the first keys, if they are in their places."""
        known = self.index[: len(entries)].copy()
        known["digest"] = entries["digest"]
        self.index[: len(entries)] = known
        return bool(known.tobytes() == entries.tobytes())

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
        try:
            write_atomically(self.out.journal, msgspec.json.encode(journal), self.out.guard)
        except OSError as error:
            raise write_error(self.out.journal, error, kept=True) from error

    def publish(self) -> None:
        """Turns the complete partial pack into the finished one."""
        changed = expert_difference(self.model, self.plan.layers, self.partial.path)
        if changed or _source_stamp(self.model) != self.stamp:
            raise SourceMismatchError(
                f"{self.model.path} changed while it was converted: use --restart once it stays as it is"
            )
        page = make_header(self.plan.layers, self.index.tobytes(), self.plan_sha256).encode()
        manifest = _manifest(self.plan, page)
        self.partial.check(page, manifest, self.out.manifest)
        self.partial.write_header(page)
        self.partial.sync()
        pack = self.out.pack
        try:
            remove(self.out.manifest)  # with force: of the pack that is now replaced
            sync_folder(pack.parent)
            self.partial.path.replace(pack)
            sync_folder(pack.parent)
        except OSError as error:
            raise write_error(pack, error, kept=True) from error
        _write_manifest(self.out, manifest)


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


def _make_plan(model: GGUFModel, layers: list[Layer], out: PackOutput) -> Manifest:
    for name in (out.pack.name, *(shard.name for shard in model.shards)):
        if not is_plain_name(name):
            raise UsageError(f"file name {name!r} cannot be written into a manifest: rename the file")
    last = layers[-1]
    end = last.data_offset + last.n_expert * last.block_bytes
    plan = Manifest(
        format=FORMAT,
        version=VERSION,
        complete=True,
        alignment=ALIGNMENT,
        files=(PackFile(out.pack.name, end),),
        source=source_fingerprint(model),
        model=model_facts(model),
        layers=tuple(layers),
        builder=BUILDER,
        header_sha256="",
    )
    problem = unreadable(plan)
    if problem:
        raise GGUFError(f"{model.path} cannot be packed, no reader would take the pack: its manifest {problem}")
    return plan


def _source_stamp(model: GGUFModel) -> str:
    """Changes when any shard is written to, even where the fingerprint does not look."""
    sha = hashlib.sha256()
    for shard in model.shards:
        info = shard.path.stat()
        sha.update(f"{shard.head_sha256} {info.st_size} {info.st_mtime_ns}\n".encode())
    return sha.hexdigest()


def _is_finished(out: PackOutput, model: GGUFModel, plan: Manifest) -> bool:
    """Whether the finished pack of this model is already there. Raises if something else is."""
    path = out.given
    if not path.exists():
        return False
    if not manifest_path(path).exists() and out.journal.exists():
        return False  # interrupted between the last two steps: _finish_published() decides
    try:
        pack = open_pack(path)
    except PackError as error:
        out.guard.check_name(out.pack, is_renamed_over=True)  # what --force would not replace either
        raise UsageError(
            f"{path} is in the way and is no finished pack ({error}): use --force to replace it"
        ) from error
    _check_same(pack, model, plan)
    return True


def _check_same(pack: Pack, model: GGUFModel, plan: Manifest) -> None:
    difference = difference_to_model(pack, model, plan.source, plan.layers)
    if difference:
        raise SourceMismatchError(
            f"{pack.path} is the pack of another model: {difference}; use --force to replace it, or another --output"
        )


def _leftover(out: PackOutput, restart: bool) -> Path | None:
    """What lies beside a finished pack: nothing, or the partial pack of a run with force, unless ``restart``."""
    if out.partial.exists() and not restart:
        return out.partial
    if out.partial.exists():
        with PartialPack(out.partial, out.guard) as partial:
            remove(out.journal)
            partial.clear()
        return None
    with contextlib.suppress(OSError):
        remove(out.journal)  # of a run that was stopped between writing the manifest and this, its last step
    return None


def _finish_published(out: PackOutput, model: GGUFModel, plan: Manifest) -> bool:
    """Writes the manifest of a pack that was renamed but whose run was stopped before the manifest."""
    if not out.pack.exists():
        return False
    journal = read_journal(out.journal)
    fd = open_regular(out.pack)
    try:
        page = os.pread(fd, HEADER_BYTES, 0)
        manifest = _manifest(plan, page)
        pack = check_pack(out.pack, fd, page, manifest, out.manifest)
        if journal is None or journal.index_sha256 != pack.header.index_sha256.hex():
            raise PackError("its journal is not there")
    except PackError:
        raise UsageError(f"{out.pack} is in the way and has no manifest: use --force to replace it") from None
    finally:
        os.close(fd)
    _check_same(pack, model, plan)
    _write_manifest(out, manifest)
    return True


def _manifest(plan: Manifest, header_page: bytes) -> bytes:
    return encode_manifest(msgspec.structs.replace(plan, header_sha256=hashlib.sha256(header_page).hexdigest()))


def _write_manifest(out: PackOutput, manifest: bytes) -> None:
    """The last step: from here on the pack is accepted. Then the journal can go."""
    try:
        write_atomically(out.manifest, manifest, out.guard)
        remove(out.journal)
        sync_folder(out.manifest.parent)
    except OSError as error:
        raise write_error(out.manifest, error, kept=True) from error
