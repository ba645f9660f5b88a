"""Which files a conversion writes: its own, never through a link, never one of the model's.

What it writes holds the model's experts, so it gives nobody a right that the model's files do not.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ..errors import UsageError
from .regular_file import check_mode, open_regular


class Guard:
    """Knows the model's files. Its methods raise OSError, or UsageError for what must not be written to."""

    def __init__(self, shards: Iterable[Path]) -> None:
        self._shards = [path.stat() for path in shards]
        # 0600 always: whoever converts must be able to go on with it
        self._mode = 0o666
        for shard in self._shards:
            self._mode &= shard.st_mode | 0o600

    def check_name(self, path: Path, *, is_renamed_over: bool = False) -> None:
        """What is there, if anything, may be overwritten; or, a weaker demand, lose this name to another file."""
        try:
            info = path.lstat()
        except FileNotFoundError:
            return
        self._check(path, info, is_renamed_over)

    def open(self, path: Path) -> int:
        """Opens a file of an earlier run for reading and writing, or makes it; returns the descriptor."""
        while True:
            try:
                fd = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
            except FileNotFoundError:
                try:
                    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode)
                except FileExistsError:
                    continue  # another run was faster
                self._give(fd)
            try:
                self._check(path, os.fstat(fd))
                self._restrict(fd)
            except BaseException:
                os.close(fd)
                raise
            return fd

    def create(self, path: Path) -> int:
        """Makes a file and opens it for writing, in place of one that an earlier run has left."""
        self.check_name(path)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode)
        self._give(fd)
        self._restrict(fd)
        return fd

    def _check(self, path: Path, info: os.stat_result, is_renamed_over: bool = False) -> None:
        problem = None
        try:
            check_mode(info.st_mode, path)
        except OSError as error:
            problem = error.strerror
        if any(os.path.samestat(info, shard) for shard in self._shards):
            problem = "it is a file of the model"
        elif problem is None and not is_renamed_over and info.st_nlink > 1:
            problem = f"the file has {info.st_nlink} names"
        if problem:
            raise UsageError(f"{path} is in the way ({problem}): move it away, or choose another --output")

    def _give(self, fd: int) -> None:
        """Who may read the model may read its pack: owner and group are the model's, as far as this user can do that."""
        for model in self._shards[:1]:
            for owner in (model.st_uid, -1):
                with contextlib.suppress(OSError):
                    os.fchown(fd, owner, model.st_gid)
                    return

    def _restrict(self, fd: int) -> None:
        """Takes away what a group other than the model's, or an earlier run, would get too much."""
        info = os.fstat(fd)
        allowed = self._mode
        if any(shard.st_gid != info.st_gid for shard in self._shards):
            allowed &= ~stat.S_IRWXG | (allowed & stat.S_IRWXO) << 3
        if stat.S_IMODE(info.st_mode) & ~allowed:
            with contextlib.suppress(OSError):  # some file systems know no permissions
                os.fchmod(fd, info.st_mode & allowed)
