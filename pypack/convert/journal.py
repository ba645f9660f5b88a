"""What survives a conversion that is stopped at any moment: its journal, and the lock on its partial pack.

The journal says how many layers are safely on the disk. It is replaced atomically, and only after their data
and index entries are synced, so it never promises more than is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from ..errors import PackError, UsageError
from ..system.guard import Guard
from ..system.regular_file import open_regular

FORMAT = "llama-expert-pack journal"
_MAX_BYTES = 1 << 20


class Journal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``plan_sha256`` covers all that decides the result, ``source_sha256`` the model's part of it.

    ``index_sha256`` covers the index entries of the first ``layers_done`` layers, kept in the partial pack.
    """

    format: str
    plan_sha256: str
    source_sha256: str
    layers_done: int
    index_sha256: str


def read_journal(path: Path) -> Journal | None:
    """The journal, or None if there is none. Raises PackError if it cannot be understood, or OSError."""
    try:
        with open(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        journal = msgspec.json.decode(data, type=Journal)
        if journal.format == FORMAT and journal.layers_done >= 0:
            return journal
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    raise PackError(f"{path} is damaged, the conversion cannot be resumed: use --restart to begin again")


def temporary_path(path: Path) -> Path:
    """Where :func:`write_atomically` writes first."""
    return path.with_name(path.name + ".tmp")


def write_atomically(path: Path, data: bytes, guard: Guard) -> None:
    """Replaces a file so that after a crash either the old or the new content is there, and syncs it.

    Raises OSError, or UsageError for a name that must not be written to.
    """
    temporary = temporary_path(path)
    fd = guard.create(temporary)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        remove(temporary)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes creations, renames and deletions in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Deletes a file, if it is there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def lock_partial(path: Path, guard: Guard) -> int:
    """Opens or creates the partial pack and locks it; returns its descriptor. UsageError if it is in use."""
    while True:
        fd = guard.open(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before us may have renamed it to the finished pack between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.lstat()):
                    return fd
        except BlockingIOError:
            os.close(fd)
            raise UsageError(
                f"{path} is being written by another conversion: wait for it, or choose another --output"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
