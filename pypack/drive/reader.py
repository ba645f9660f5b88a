"""Reads experts from a pack into memory, several at a time, from a few threads.

    submit --(at most stage_slots blocks in flight, the rest wait)--> parts --queue--> threads: preadv
    last part of a block: checksum --> failed parts again, up to `retries` times --> on_done, exactly once

A block is cut into parts only while there are threads without work: one expert then arrives sooner, and many
experts are read whole.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import xxhash

from ..errors import PackError, ReadError, UsageError
from ..format.layout import ALIGNMENT, Extent, Layer, align_up
from ..stats.counters import Counter, Counters
from ..values.checks import check_choice, check_count
from ..values.options import READ_SPLITS_MAX, STAGE_SLOTS_MAX, VERIFY_MODES, Verify
from .direct_io import WITHOUT_DIRECT_IO, PreadInto, address, aligned_buffer, open_file, pread_into, read_exact

__all__ = [
    "OnDone",
    "ReadablePack",
    "Reader",
]

OnDone = Callable[[ReadError | None], None]
_RETRIES_MAX = 100
_THREADS_MAX = 16
_PART_BYTES_MIN = 1 << 20  # below this a part costs more than its parallel read gains
_BOUNCE_BYTES = 2 << 20

_log = logging.getLogger(__name__)


class ReadablePack(Protocol):
    """What the reader needs of :class:`llama_expert_pack.pypack.format.pack.Pack`."""

    @property
    def layers(self) -> Sequence[Layer]: ...
    @property
    def files(self) -> Sequence[Path]: ...
    def extents(self, layer: int, expert: int) -> tuple[Extent, ...]: ...
    def digest(self, layer: int, expert: int) -> bytes: ...


_Part = Sequence[Extent]  # cut at multiples of ALIGNMENT in the file


@dataclass(eq=False)
class _Block:
    """One expert on its way."""

    layer: int
    expert: int
    extents: tuple[Extent, ...]
    dest: memoryview
    on_done: OnDone
    retries_left: int
    parts: Sequence[_Part] = ()
    n_left: int = 0  # parts not yet ended
    failed: list[_Part] = field(default_factory=list)
    error: ReadError | None = None


class Reader:
    """A bounded pool of reader threads over the files of a pack. Thread-safe.

    ``direct_io`` False reads through the page cache, and counts each block in ``FALLBACKS``.
    ``read_splits``: parts that one block is cut into at most; ``stage_slots``: blocks in flight at most.
    ``verify``: check a block's xxh3_128 at the first read of the expert here, at every read, or never.
    ``retries``: how often a failed, short or corrupt read is tried again.
    ``pread`` replaces the system call: a faster one, or a failing one in tests.

    Raises :class:`llama_expert_pack.pypack.errors.DirectIOError`, :class:`ReadError` or :class:`UsageError`.
    """

    def __init__(
        self,
        pack: ReadablePack,
        *,
        direct_io: bool = True,
        read_splits: int = 4,
        stage_slots: int = 12,
        verify: Verify = "first",
        retries: int = 3,
        counters: Counters | None = None,
        pread: PreadInto = pread_into,
    ) -> None:
        check_count("read_splits", read_splits, 1, READ_SPLITS_MAX)
        check_count("stage_slots", stage_slots, 1, STAGE_SLOTS_MAX)
        check_count("retries", retries, 0, _RETRIES_MAX)
        check_choice("verify", verify, VERIFY_MODES)
        self._pack = pack
        self._layers = tuple(pack.layers)
        self._direct_io = direct_io
        self._read_splits = read_splits
        self._stage_slots = stage_slots
        self._verify = verify
        self._retries = retries
        self._counters = counters or Counters()
        self._pread = pread
        self._verified = bytearray(sum(layer.n_expert for layer in pack.layers))  # [n_keys] 1: checked once
        self._fds = _open_all(pack.files, direct_io)
        self._pid = os.getpid()

        self._lock = threading.Lock()  # guards the next five, and the blocks' n_left, failed and error
        self._ended = threading.Condition(self._lock)
        self._n_open = 0  # submitted, on_done not yet returned
        self._n_in_flight = 0
        self._waiting: deque[_Block] = deque()
        self._closed = False

        self._queue: SimpleQueue[tuple[_Block, _Part] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"expert-reader-{i}", daemon=True)
            for i in range(min(stage_slots * read_splits, _THREADS_MAX))
        ]
        started: list[threading.Thread] = []
        try:
            for thread in self._threads:
                thread.start()
                started.append(thread)
        except BaseException:  # no more threads: those that run, and the files, must not stay
            self._threads = started
            self.close()
            raise

    @property
    def fds(self) -> Sequence[int]:
        """The pack's files, open for as long as this reader."""
        return self._fds

    def submit(self, layer: int, expert: int, dest: memoryview, on_done: OnDone) -> None:
        """Start to read an expert into ``dest``; ``on_done(error or None)`` is called when that ends.

        ``dest``: writable, block_bytes long, with direct I/O page-aligned; the caller's until it calls, the
        reader's until ``on_done``. ``on_done`` comes from a reader thread, exactly once; it may submit.
        Raises ValueError for a wrong argument, RuntimeError after :meth:`close` and :class:`PackError` for
        extents that do not fit, and :class:`UsageError` in a forked child; ``on_done`` is not called then.
        """
        if os.getpid() != self._pid:
            raise UsageError("this reader's threads are in the process that forked this one: make a reader here")
        dest = self._checked_dest(layer, expert, dest)
        extents = self._checked_extents(layer, expert)
        block = _Block(layer, expert, extents, dest, on_done, self._retries)
        with self._lock:
            if self._closed:
                raise RuntimeError("the reader is closed")
            self._n_open += 1
            if self._n_in_flight == self._stage_slots:
                self._waiting.append(block)
                return
            self._n_in_flight += 1
        self._start(block)

    def close(self) -> None:
        """Wait for all that was submitted, stop the threads, close the files. Not from ``on_done``.

        In a forked child, which has neither the reads nor the threads, only the files are closed.
        """
        if os.getpid() != self._pid:
            _close_all(self._fds)
            return
        if threading.current_thread() in self._threads:
            raise RuntimeError("the reader cannot be closed by one of its own threads")
        with self._lock:
            was_closed, self._closed = self._closed, True
            while self._n_open:
                self._ended.wait()
        if not was_closed:
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            thread.join()
        with self._lock:
            _close_all(self._fds)

    # ---- a block's way through the reader

    def _checked_dest(self, layer: int, expert: int, dest: memoryview) -> memoryview:
        if not 0 <= layer < len(self._layers) or not 0 <= expert < self._layers[layer].n_expert:
            raise ValueError(f"the pack has no expert {expert} in layer {layer}")
        expected = self._layers[layer].block_bytes
        if dest.readonly or not dest.c_contiguous or dest.nbytes != expected:
            raise ValueError(f"expert {expert} of layer {layer} needs {expected} writable bytes, not {dest!r}")
        if self._direct_io and address(dest) % ALIGNMENT:
            raise ValueError(f"direct I/O needs memory aligned to {ALIGNMENT} bytes, not {address(dest):#x}")
        return dest.cast("B")

    def _checked_extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        extents = self._pack.extents(layer, expert)
        end = self._layers[layer].block_bytes
        for extent in extents:
            fits = extent.dest_offset >= 0 and extent.dest_offset + extent.length <= end
            if not (fits and extent.length > 0 and extent.offset >= 0 and 0 <= extent.file_id < len(self._pack.files)):
                raise PackError(f"expert {expert} of layer {layer} does not fit its block of {end} bytes: {extent}")
        return extents

    def _start(self, block: _Block) -> None:
        _zero_gaps(block.dest, block.extents)
        n_idle = len(self._threads) // self._n_in_flight
        n_parts = min(self._read_splits, max(1, n_idle), -(-len(block.dest) // _PART_BYTES_MIN))
        block.parts = [block.extents] if n_parts == 1 else _cut(block.extents, n_parts)
        self._enqueue(block, block.parts)

    def _enqueue(self, block: _Block, parts: Sequence[_Part]) -> None:
        block.n_left = len(parts)
        block.failed = []
        for part in parts:
            self._queue.put((block, part))

    def _run(self) -> None:
        bounce = aligned_buffer(_BOUNCE_BYTES)  # untouched memory costs nothing
        while (work := self._queue.get()) is not None:
            block, part = work
            error: ReadError | None = None
            try:
                self._read_part(block, part, bounce)
            except Exception as cause:  # whatever happened, on_done must be called
                error = self._read_error(block, part, cause)
            with self._lock:
                if error is not None:
                    block.failed.append(part)
                    block.error = error
                block.n_left -= 1
                is_last = block.n_left == 0
            if is_last:
                self._settle(block)
            del work, block, part, error  # hold no block while waiting for the next

    def _settle(self, block: _Block) -> None:
        """All parts have ended: report the block, or read again what failed."""
        again: Sequence[_Part] = block.failed
        if not again:
            try:
                block.error = self._digest_error(block)
            except Exception as cause:  # on_done must be called
                block.error = self._read_error(block, block.parts[0], cause)
            if block.error is None:
                self._finish(block, None)
                return
            again = block.parts
        n_errors = len(block.failed) or 1
        self._counters.add(Counter.IO_ERRORS, n_errors)
        if block.retries_left == 0:
            self._finish(block, block.error)
            return
        block.retries_left -= 1
        self._counters.add(Counter.IO_RETRIES, n_errors)
        self._enqueue(block, again)

    def _finish(self, block: _Block, error: ReadError | None) -> None:
        if not self._direct_io:
            self._counters.add(Counter.FALLBACKS)
        following: _Block | None = None
        with self._lock:
            if self._waiting:
                following = self._waiting.popleft()
            else:
                self._n_in_flight -= 1
        if following is not None:
            self._start(following)
        try:
            block.on_done(error)
        except Exception:
            _log.exception("the end of the read of expert %d of layer %d was not handled", block.expert, block.layer)
        with self._lock:
            self._n_open -= 1
            if self._n_open == 0:
                self._ended.notify_all()

    # ---- reading and checking

    def _read_part(self, block: _Block, part: _Part, bounce: memoryview) -> None:
        n_bytes = 0
        for segment in part:
            fd = self._fds[segment.file_id]
            dest = block.dest[segment.dest_offset : segment.dest_offset + segment.length]
            if not self._direct_io:
                n_bytes += read_exact(fd, dest, segment.offset, alignment=1, pread=self._pread)
            elif (segment.offset | segment.length | segment.dest_offset) % ALIGNMENT == 0:
                n_bytes += read_exact(fd, dest, segment.offset, pread=self._pread)
            else:
                n_bytes += self._read_unaligned(fd, dest, segment.offset, bounce)
        self._counters.add(Counter.READ_BYTES, n_bytes)

    def _read_unaligned(self, fd: int, dest: memoryview, offset: int, bounce: memoryview) -> int:
        """Read the aligned range around the bytes into ``bounce``, piece by piece, and copy them."""
        target = np.frombuffer(dest, np.uint8)
        source = np.frombuffer(bounce, np.uint8)
        n_bytes = done = 0
        while done < len(dest):
            skip = (offset + done) % ALIGNMENT
            n = min(len(dest) - done, len(bounce) - skip)
            n_aligned = align_up(skip + n, ALIGNMENT)
            start = offset + done - skip
            n_bytes += read_exact(fd, bounce[:n_aligned], start, n_needed=skip + n, pread=self._pread)
            np.copyto(target[done : done + n], source[skip : skip + n])  # unlike a slice, lets other threads run
            done += n
        return n_bytes

    def _digest_error(self, block: _Block) -> ReadError | None:
        key = self._layers[block.layer].first_key + block.expert
        if self._verify == "off" or (self._verify == "first" and self._verified[key]):
            return None
        expected = self._pack.digest(block.layer, block.expert)
        found = xxhash.xxh3_128_digest(block.dest)
        if found == expected:
            self._verified[key] = 1
            return None
        return ReadError(
            f"{self._path(block.parts[0])}: expert {block.expert} of layer {block.layer} has checksum "
            f"{found.hex()}, expected {expected.hex()}: the file or the disk is damaged; check it with "
            "`expert-pack verify --deep`"
        )

    def _read_error(self, block: _Block, part: _Part, cause: Exception) -> ReadError:
        code = cause.errno if isinstance(cause, OSError | ReadError) else 0
        why = (isinstance(cause, OSError) and cause.strerror) or str(cause) or type(cause).__name__
        if code == errno.EINVAL and self._direct_io:  # some file systems open and read one page, but not more
            why += f"; direct I/O of this size seems not possible: {WITHOUT_DIRECT_IO}"
        return ReadError(
            f"{self._path(part)}: expert {block.expert} of layer {block.layer} could not be read: {why}",
            code or 0,
        )

    def _path(self, part: _Part) -> Path:
        return self._pack.files[part[0].file_id]


def _cut(extents: Sequence[Extent], n_parts: int) -> Sequence[_Part]:
    """At most ``n_parts`` parts of about equal bytes, cut at multiples of ALIGNMENT in the file."""
    part_bytes = align_up(-(-sum(extent.length for extent in extents) // n_parts), ALIGNMENT)
    parts: list[list[Extent]] = [[]]
    n_left = part_bytes
    for extent in extents:
        start, end = extent.offset, extent.offset + extent.length
        while start < end:
            if n_left <= 0:
                parts.append([])
                n_left = part_bytes
            cut = min(end, align_up(start + n_left, ALIGNMENT))
            parts[-1].append(Extent(extent.file_id, start, cut - start, extent.dest_offset + start - extent.offset))
            n_left -= cut - start
            start = cut
    return parts


def _zero_gaps(dest: memoryview, extents: Sequence[Extent]) -> None:
    """Zero what no extent fills: the slot may still hold another layer's bytes where padding must be zero."""
    filled = 0
    for extent in sorted(extents, key=lambda extent: extent.dest_offset):
        dest[filled : extent.dest_offset] = bytes(extent.dest_offset - filled)
        filled = extent.dest_offset + extent.length
    dest[filled:] = bytes(len(dest) - filled)


def _open_all(files: Sequence[Path], direct_io: bool) -> list[int]:
    fds: list[int] = []
    try:
        for path in files:
            fds.append(open_file(path, direct_io))
    except BaseException:
        _close_all(fds)
        raise
    return fds


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
