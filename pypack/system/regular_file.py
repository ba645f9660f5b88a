"""Opens files that must be regular ones: a FIFO would hang for ever, a device would never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFLNK: "a symbolic link",
}


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """As ``os.open``, and never waits for whoever is at the other end of a FIFO; returns the descriptor.

    Raises OSError, also for what is no regular file: its ``strerror`` then says what it is.
    """
    # a FIFO opened for writing that nobody reads is ENXIO with O_NONBLOCK; regular files do not know the flag
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:
            check_regular(path)
        raise
    try:
        check_mode(os.fstat(fd).st_mode, path)
        os.set_blocking(fd, True)  # network file systems may know O_NONBLOCK
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises OSError unless the path, links followed, is a regular file."""
    check_mode(Path(path).stat().st_mode, path)


def check_mode(mode: int, path: str | os.PathLike[str]) -> None:
    """Raises OSError unless ``st_mode`` is that of a regular file."""
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))
