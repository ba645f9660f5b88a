"""Reads the blocks that native could not read, one at a time a thread, with retries and a reason.

submit --queue--> thread: preadv, checksum, up to RETRIES times again --> deliver, unless it is in place --> on_done
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

import xxhash

from ..errors import ReadError, UsageError
from ..format.layout import ALIGNMENT
from ..format.pack import Pack
from ..stats.counters import Counter, Counters
from .direct_io import WITHOUT_DIRECT_IO, PreadInto, address, aligned_buffer, open_file, pread_into, read_exact

RETRIES = 3
OnDone = Callable[[ReadError | None], None]
Deliver = Callable[[memoryview], None]
"""Copies a block to memory that the host can't write to, and returns when it is there; raises :class:`ReadError`."""

_N_THREADS = 2  # few blocks come here, and each thread may take the memory of one

_log = logging.getLogger(__name__)


class _Request(NamedTuple):
    layer: int
    expert: int
    target: memoryview | Deliver
    on_done: OnDone


class Reader:
    """Two threads over the file of a pack. Thread-safe.

    ``direct_io`` False reads through the page cache, and counts each block in ``FALLBACKS``. ``pread`` replaces the
    system call, in tests by one that fails.
    Raises :class:`llama_expert_pack.pypack.errors.DirectIOError` or :class:`ReadError`.
    """

    def __init__(
        self, pack: Pack, *, direct_io: bool = True, counters: Counters | None = None, pread: PreadInto = pread_into
    ) -> None:
        self._pack = pack
        self._layers = pack.layers
        self._direct_io = direct_io
        self._counters = counters or Counters()
        self._pread = pread
        self.fd = open_file(pack.path, direct_io)  # open until close(), -1 then
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards closed, and fd's end
        self._closed = False
        self._queue: SimpleQueue[_Request | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for i in range(_N_THREADS):
                thread = threading.Thread(target=self._run, name=f"expert-reader-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # no more threads: those that run, and the file, must not stay
            self.close()
            raise

    def submit(self, layer: int, expert: int, target: memoryview | Deliver, on_done: OnDone) -> None:
        """Start to read an expert into ``target``; ``on_done(error or None)`` is called when that ends.

        ``target``: memory, writable, block_bytes long and with direct I/O page-aligned, the reader's until ``on_done``;
        or what takes the right bytes. Both functions are called from a reader thread, ``on_done`` exactly once;
        it may submit.
        Raises IndexError or ValueError for a wrong argument, RuntimeError after :meth:`close` and :class:`UsageError`
        in a forked child; ``on_done`` is not called then.
        """
        if os.getpid() != self._pid:
            raise UsageError("this reader's threads are in the process that forked this one: make a reader here")
        self._pack.offset(layer, expert)  # there is such an expert
        if isinstance(target, memoryview):
            self._check_memory(layer, expert, target)
        with self._lock:
            if self._closed:
                raise RuntimeError("the reader is closed")
            self._queue.put(_Request(layer, expert, target, on_done))

    def close(self) -> None:
        """Wait for all that was submitted, stop the threads, close the file. Not from ``on_done``.

        In a forked child, which has neither the reads nor the threads, only the file is closed.
        """
        if os.getpid() != self._pid:
            self._close_file()
            return
        with self._lock:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            thread.join()
        with self._lock:
            self._close_file()

    def _close_file(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _check_memory(self, layer: int, expert: int, memory: memoryview) -> None:
        expected = self._layers[layer].block_bytes
        if memory.readonly or not memory.c_contiguous or memory.nbytes != expected:
            raise ValueError(f"expert {expert} of layer {layer} needs {expected} writable bytes, not {memory!r}")
        if self._direct_io and address(memory) % ALIGNMENT:
            raise ValueError(f"direct I/O needs memory aligned to {ALIGNMENT} bytes, not {address(memory):#x}")

    # ---- in a reader thread

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            error = self._serve(request)
            if not self._direct_io:
                self._counters.add(Counter.FALLBACKS)
            try:
                request.on_done(error)
            except Exception:
                _log.exception(
                    "the end of the read of expert %d of layer %d was not handled", request.expert, request.layer
                )
            del request, error  # hold no block while waiting for the next

    def _serve(self, request: _Request) -> ReadError | None:
        layer, expert, target, _ = request
        if isinstance(target, memoryview):
            return self._read(layer, expert, target.cast("B"))
        try:
            block = aligned_buffer(self._layers[layer].block_bytes)
            error = self._read(layer, expert, block)
            if error is None:
                target(block)
            return error
        except ReadError as cause:
            return cause
        except Exception as cause:  # whatever happened, on_done must be called
            return self._read_error(layer, expert, cause)

    def _read(self, layer: int, expert: int, block: memoryview) -> ReadError | None:
        for n_left in range(RETRIES, -1, -1):
            error = self._attempt(layer, expert, block)
            if error is None:
                break
            self._counters.add(Counter.IO_ERRORS)
            if n_left:
                self._counters.add(Counter.IO_RETRIES)
        return error

    def _attempt(self, layer: int, expert: int, block: memoryview) -> ReadError | None:
        try:
            alignment = ALIGNMENT if self._direct_io else 1
            offset = self._pack.offset(layer, expert)
            n_bytes = read_exact(self.fd, block, offset, alignment=alignment, pread=self._pread)
            self._counters.add(Counter.READ_BYTES, n_bytes)
            return self._digest_error(layer, expert, block)
        except Exception as cause:  # whatever happened, on_done must be called
            return self._read_error(layer, expert, cause)

    def _digest_error(self, layer: int, expert: int, block: memoryview) -> ReadError | None:
        expected = self._pack.digest(layer, expert)
        found = xxhash.xxh3_128_digest(block)
        if found == expected:
            return None
        return ReadError(
            f"{self._pack.path}: expert {expert} of layer {layer} has checksum {found.hex()}, expected "
            f"{expected.hex()}: the file or the disk is damaged; check it with `expert-pack verify --deep`"
        )

    def _read_error(self, layer: int, expert: int, cause: Exception) -> ReadError:
        code = cause.errno if isinstance(cause, OSError | ReadError) else 0
        why = (isinstance(cause, OSError) and cause.strerror) or str(cause) or type(cause).__name__
        if code == errno.EINVAL and self._direct_io:  # some file systems open and read one page, but not more
            why += f"; direct I/O of this size seems not possible: {WITHOUT_DIRECT_IO}"
        return ReadError(f"{self._pack.path}: expert {expert} of layer {layer} could not be read: {why}", code or 0)
