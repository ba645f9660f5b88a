"""Files that this package writes over: only if they are of the kind that it writes, and never its own input."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import UsageError
from .regular_file import open_regular

READ_ONLY = "it is read-only"
_HEAD_BYTES = 1 << 16  # of a file, to tell what it is


def refuse_same_file(
    outputs: Mapping[str, str | os.PathLike[str]], inputs: Mapping[str, str | os.PathLike[str]]
) -> None:
    """``outputs``: path by option; ``inputs``: path by what it is. Links are followed, hard links are the same file.

    Raises :class:`UsageError` if an output is an input or another output.
    """
    taken = {_identity(path): what for what, path in inputs.items()}
    for option, path in outputs.items():
        identity = _identity(path)
        if identity in taken:
            raise UsageError(f"{path}: {option} is the same file as {taken[identity]}: give it a file of its own")
        taken[identity] = option


def _identity(path: str | os.PathLike[str]) -> tuple[object, ...]:
    """Device and inode; of what does not exist yet, its name in its folder."""
    resolved = os.path.realpath(path)
    try:
        found = Path(resolved).stat()
        return found.st_dev, found.st_ino
    except OSError:
        folder, name = os.path.split(resolved)
    try:
        found = Path(folder).stat()
        return found.st_dev, found.st_ino, name
    except OSError:
        return (resolved,)


def open_output(path: str | os.PathLike[str], is_ours: Callable[[bytes], bool], kind: str) -> int:
    """Opens or creates a file and locks it; its content is still there. ``is_ours``: says of the first bytes of a file
    that is not empty whether it is a ``kind``, and may be overwritten.

    Raises OSError, whose ``strerror`` says what is wrong also with a file that is something else, or in use.
    """
    while True:
        fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            check_writable(os.fstat(fd))
            if own_stream(os.fstat(fd)):
                raise OSError(errno.EBUSY, "stdout or stderr goes there")
            lock(fd)
            head = os.pread(fd, _HEAD_BYTES, 0)
            if head and not is_ours(head):
                raise OSError(errno.EEXIST, f"it holds something else than {kind}, which would be lost")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), Path(path).stat()):
                    return fd  # else whoever held the lock has replaced the file meanwhile
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                error.filename = os.fspath(path)
            raise
        os.close(fd)


def write_output(path: str | os.PathLike[str], data: bytes, is_ours: Callable[[bytes], bool], kind: str) -> None:
    """As :func:`open_output`, and writes the whole content."""
    with open(open_output(path, is_ours, kind), "wb") as file:
        file.truncate()
        file.write(data)


def check_writable(found: os.stat_result) -> None:
    """Raises OSError for a file without any permission to write: root could, but somebody meant it to stay."""
    if not found.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(errno.EACCES, READ_ONLY)


def lock(fd: int) -> None:
    """Until it is closed. Raises OSError if another process, or another part of this one, holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(error.errno, "it is being written by another run") from None
    except OSError:  # a file system without locks
        pass


def what_to_give(error: OSError) -> str:
    """The rest of a sentence about an output that can't be opened."""
    if (
        error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)
        and error.strerror != READ_ONLY
    ):
        return "give a file in a folder that exists and is writable"
    return (
        "give a file of its own" if error.errno != errno.ENOSPC else "free some space, or give a file on another disk"
    )


def own_stream(found: os.stat_result) -> int:
    """stdout or stderr if it goes there, else 0. Written over, such a file would lose what they say."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), found):
                return fd
    return 0
