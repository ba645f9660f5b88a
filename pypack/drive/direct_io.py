"""Direct I/O (O_DIRECT): reads that bypass the page cache and land where the caller wants them.

The contract: file offset, length and buffer address are multiples of :data:`ALIGNMENT`. :func:`open_file`
proves when a file is opened that the file system keeps it, and fails otherwise: there is no silent fallback.

What a file needs is asked with ``statx(STATX_DIOALIGN)`` where Python offers ``os.statx`` (3.15 on); an older
Python cannot ask without a foreign-function library. Everywhere the file is then read once, directly, with
offset, length and address that are multiples of ALIGNMENT and of no more: the same question, put by trying.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DirectIOError, ReadError
from ..format.layout import ALIGNMENT
from ..system.regular_file import open_regular

WITHOUT_DIRECT_IO = "move the file to a local disk, or turn direct I/O off with expert_direct_io=False"
_MADV_WIPEONFORK = 18  # a forked child gets zeros: pages that both share would get a direct read in one of them only

PreadInto = Callable[[int, memoryview, int], int]
"""(fd, buffer, offset) -> bytes read into the buffer, 0 at the end of the file; raises OSError."""


def pread_into(fd: int, buffer: memoryview, offset: int) -> int:
    """One preadv(2) into one buffer."""
    return os.preadv(fd, [buffer], offset)


def aligned_buffer(n_bytes: int) -> memoryview:
    """Zeroed, page-aligned memory of its own, ``n_bytes`` long; freed with the last view of it."""
    memory = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # only a hint: fewer pages to pin for each direct read
            memory.madvise(mmap.MADV_HUGEPAGE)
    with contextlib.suppress(OSError):
        memory.madvise(_MADV_WIPEONFORK)
    return memoryview(memory)[:n_bytes]


def address(view: memoryview) -> int:
    """Where the view's bytes lie in memory."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def open_file(path: str | os.PathLike[str], direct_io: bool = True) -> int:
    """Open for reading; returns the file descriptor. With ``direct_io``, reads bypass the page cache.

    Raises :class:`DirectIOError` if that is not possible, :class:`ReadError` if the file cannot be opened.
    """
    path = Path(path)
    flags = os.O_RDONLY
    if not direct_io:
        return _open(path, flags)
    if not hasattr(os, "O_DIRECT"):
        raise _impossible(path, "this platform has no O_DIRECT")
    try:
        fd = _open(path, flags | os.O_DIRECT)
    except ReadError as error:
        if error.errno == errno.EINVAL:
            os.close(_open(path, flags))  # opens without it, or says what is wrong
            raise _impossible(path, "the file system refuses to open files with O_DIRECT") from error
        raise
    try:
        _check_statx(path)
        _check_read(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_exact(
    fd: int,
    buffer: memoryview,
    offset: int,
    *,
    n_needed: int | None = None,
    alignment: int = ALIGNMENT,
    pread: PreadInto = pread_into,
) -> int:
    """Fill ``buffer`` from ``offset`` on, in as many reads as it takes; returns the bytes that they gave.

    ``n_needed``: fewer bytes are enough if the file ends there (an aligned read may reach past the end).
    ``alignment``: 1 if ``fd`` was opened without direct I/O.
    Raises :class:`ReadError` (errno 0) if the data ends too early, OSError if the system refuses.
    """
    n_needed = len(buffer) if n_needed is None else n_needed
    done = total = 0
    while done < n_needed:
        try:
            n = pread(fd, buffer[done:], offset + done)
        except InterruptedError:
            continue
        total += n
        if done + n >= n_needed:
            break
        # what follows a short read must start aligned again; the bytes since then are read twice
        resume = (done + n) // alignment * alignment
        if resume <= done:
            raise ReadError(f"expected {n_needed} bytes at offset {offset}, found {done + n}")
        done = resume
    return total


def _open(path: Path, flags: int) -> int:
    try:
        return open_regular(path, flags)
    except OSError as error:
        raise ReadError(f"{path}: cannot be opened: {error.strerror}", error.errno or 0) from error


def _check_statx(path: Path) -> None:
    statx: Any = getattr(os, "statx", None)
    if statx is None:
        return
    found = statx(path, os.STATX_DIOALIGN)  # type: ignore[attr-defined, unused-ignore]
    memory, offset = found.stx_dio_mem_align, found.stx_dio_offset_align
    if memory is None or offset is None:
        return  # the kernel or the file system does not say: the trial read decides
    if memory == 0 or offset == 0:
        raise _impossible(path, "the file system does not support direct I/O on this file")
    if ALIGNMENT % memory or ALIGNMENT % offset:
        raise _impossible(
            path, f"it needs buffers aligned to {memory} and offsets to {offset} bytes, more than {ALIGNMENT}"
        )


def _check_read(path: Path, fd: int) -> None:
    """Read pages at odd multiples of ALIGNMENT, first and last, into memory at an odd multiple of it."""
    room = aligned_buffer(3 * ALIGNMENT)
    start = ALIGNMENT if address(room) // ALIGNMENT % 2 == 0 else 2 * ALIGNMENT
    page = room[start : start + ALIGNMENT]
    n_pages = os.fstat(fd).st_size // ALIGNMENT
    for n in sorted({0, min(1, n_pages), max(0, n_pages - 1)}):
        try:
            pread_into(fd, page, n * ALIGNMENT)
        except OSError as error:
            raise _impossible(
                path, f"a direct read of {ALIGNMENT} bytes at offset {n * ALIGNMENT} failed: {error.strerror}"
            ) from error


def _impossible(path: Path, why: str) -> DirectIOError:
    return DirectIOError(f"{path}: direct I/O is not possible: {why}; {WITHOUT_DIRECT_IO}")
