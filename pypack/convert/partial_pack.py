"""The pack while it is written: NAME.expert-pack.partial, locked, its room reserved, synced by layer."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from ..errors import ExpertPackError, PackError, ReadError, SpaceError
from ..format.header import ENTRY_BYTES, HEADER_BYTES, Index
from ..format.layout import ALIGNMENT
from ..format.pack import check_pack
from ..system.guard import Guard
from .assemble import Bytes
from .journal import lock_partial, remove

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class PartialPack:
    """Holds the lock while open. Blocks may be written from several threads, the rest from one.

    What the disk refuses raises SpaceError, PackError or ReadError, see :func:`write_error`.
    """

    def __init__(self, path: Path, guard: Guard) -> None:
        self.path = path
        try:
            self._fd = lock_partial(path, guard)
        except OSError as error:
            raise write_error(path, error) from error
        self._direct_fd = self._open_direct()
        self._direct = self._direct_fd != self._fd

    def __enter__(self) -> PartialPack:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def close(self) -> None:
        """Closes and unlocks; a partial pack that never got any content is removed."""
        if self._fd < 0:
            return
        if os.fstat(self._fd).st_size == 0:
            remove(self.path)
        for fd in {self._fd, self._direct_fd}:
            os.close(fd)
        self._fd = self._direct_fd = -1

    @property
    def size_bytes(self) -> int:
        """Of the file, whether there is room for it on the disk yet or not."""
        return os.fstat(self._fd).st_size

    @property
    def allocated_bytes(self) -> int:
        """Room that the file has on the disk."""
        return os.fstat(self._fd).st_blocks * 512

    def clear(self) -> None:
        """Throws the content away."""
        os.ftruncate(self._fd, 0)

    def reserve(self, size_bytes: int) -> None:
        """Gives the file its final size and, where the file system can, its room on the disk."""
        was_empty = self.size_bytes == 0
        write_only = self._reopen(os.O_WRONLY)
        try:
            os.ftruncate(write_only, size_bytes)
            # Write-only, because glibc falls back to writing every block where nothing can be reserved; the
            # fallback needs to read first, so it fails at once with EBADF instead of writing a terabyte.
            os.posix_fallocate(write_only, 0, size_bytes)
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
                return
            if was_empty:
                self.clear()
            raise write_error(self.path, error, kept=not was_empty) from error
        finally:
            os.close(write_only)

    def write_blocks(self, data: Bytes, offset: int) -> None:
        """Writes whole aligned pages at an aligned offset, past the page cache where possible."""
        view = data.data
        done = 0
        while done < len(view):
            direct = self._direct
            try:
                n = os.pwrite(self._direct_fd if direct else self._fd, view[done:], offset + done)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    self._direct = False  # the file system took O_DIRECT when opening, but cannot do it
                    continue
                raise write_error(self.path, error, kept=True) from error
            # A short direct write must go on at an aligned place.
            step = n if done + n == len(view) else n // ALIGNMENT * ALIGNMENT
            if step == 0:
                raise write_error(self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), kept=True)
            done += step
        if not self._direct:
            os.posix_fadvise(self._fd, offset, len(view), os.POSIX_FADV_DONTNEED)

    def write_index(self, entries: Index, first_key: int) -> None:
        """Writes entries of the index; ``first_key``: that of the first one."""
        self._write(entries.tobytes(), HEADER_BYTES + first_key * ENTRY_BYTES)

    def read_index(self, n_keys: int) -> bytes:
        """The entries of the first ``n_keys`` keys; fewer bytes if the file ends before."""
        return os.pread(self._fd, n_keys * ENTRY_BYTES, HEADER_BYTES)

    def check(self, page: bytes, manifest: bytes, where: Path) -> None:
        """Lets the reader's own code open it with this header page and this manifest. Raises PackError."""
        try:
            check_pack(self.path, self._fd, page, manifest, where)
        except PackError as error:
            raise PackError(
                f"{self.path} is damaged and cannot be finished: use --restart to begin again ({error})"
            ) from error

    def write_header(self, page: bytes) -> None:
        """Writes the header page: from then on the file is a pack."""
        self._write(page, 0)

    def sync(self) -> None:
        """Makes all that was written safe from a crash."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise write_error(self.path, error, kept=True) from error

    def _open_direct(self) -> int:
        """A descriptor that bypasses the page cache, or the plain one where the file system has none."""
        try:
            return self._reopen(os.O_WRONLY | os.O_DIRECT)
        except (OSError, AttributeError):
            return self._fd

    def _reopen(self, flags: int) -> int:
        """One more descriptor of the same file. Raises OSError if its name is another file's by now."""
        fd = os.open(self.path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not os.path.samestat(os.fstat(fd), os.fstat(self._fd)):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "it was replaced by another file", str(self.path))
        return fd

    def _write(self, data: bytes, offset: int) -> None:
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)
        except OSError as error:
            raise write_error(self.path, error, kept=True) from error


def write_error(path: Path, error: OSError, kept: bool = False) -> ExpertPackError:
    """What a failed write means, as one sentence; ``kept``: what was written so far stays for a later run."""
    resume = "; what was written is kept: run the same command again to go on" if kept else ""
    if error.errno in _NO_SPACE:
        return SpaceError(f"the disk is full while writing {path}: free some space, or choose another --output{resume}")
    if error.errno == errno.EFBIG:
        return SpaceError(f"{path}: the file system or a limit allows no file this large: choose another --output")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return PackError(f"{path} cannot be written ({error.strerror}): choose a folder you may write to with --output")
    return ReadError(f"{path} cannot be written: {error.strerror}{resume}", error.errno or 0)
