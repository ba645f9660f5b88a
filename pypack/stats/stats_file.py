"""A file that always holds the latest statistics, for people and monitors that watch a running process.

a regular file, or none yet     replaced by rename, links followed: never half written
a character device, a FIFO      gets a line at each update, as much as it takes at once; without a reader none
what stderr or stdout goes to   gets a line at each update, at its end
anything else                   refused
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import select
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from ..errors import UsageError
from ..system.output_file import check_writable, lock, open_output, own_stream, what_to_give
from ..system.regular_file import check_regular
from ..values.checks import check_seconds
from .counters import ExpertStats

_log = logging.getLogger(__name__)
_KEYS = {"acquires", "hits", "misses", "evictions"}
_NOBODY_READS = (errno.ENXIO, errno.EPIPE, errno.EAGAIN)

# A child that is forked in the middle of an update would inherit half of it.
_writing = threading.Lock()
os.register_at_fork(before=_writing.acquire, after_in_parent=_writing.release, after_in_child=_writing.release)


class StatsWriter:
    """Writes ``snapshot()`` as JSON to ``path`` now, every ``interval_s`` seconds and at :meth:`close`.

    A path that cannot be written, or holds something else than statistics, raises :class:`UsageError` here;
    a write that fails later is logged, so that a full disk does not stop the model.
    """

    def __init__(self, path: str | os.PathLike[str], interval_s: float, snapshot: Callable[[], ExpertStats]) -> None:
        self._path = Path(os.path.abspath(path))  # noqa: PTH100 (keeps links); the working folder may change
        self._interval_s = min(check_seconds("the statistics interval", interval_s), threading.TIMEOUT_MAX)
        self._snapshot = snapshot
        self._target: Path | None = None  # what is replaced; None: the path gets lines
        self._locked = -1  # the file that is there now, by this run
        try:
            self._take()
            self._write()
        except OSError as error:
            self._release()
            raise UsageError(
                f"{self._path}: the statistics file cannot be written: {error.strerror}; {what_to_give(error)}"
            ) from error
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="expert-stats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the last state and stop. Further calls do nothing. In a forked child the file is left to the parent."""
        if os.getpid() != self._pid:
            self._release()  # the child's copy, which would keep it locked
            return
        self._closing.set()
        self._thread.join()
        self._release()

    def _run(self) -> None:
        while True:
            closing = self._closing.wait(self._interval_s)
            try:
                self._write()
            except OSError as error:
                _log.warning("%s: the statistics file could not be written: %s", self._path, error.strerror)
            if closing:
                return

    def _take(self) -> None:
        """Decide for the whole run what is written how; lock what is there, if it is a file that will be replaced."""
        if self._is_replaced():
            self._target = Path(os.path.realpath(self._path))
            if self._target.exists():
                self._locked = open_output(self._target, _is_statistics, "statistics")

    def _release(self) -> None:
        fd, self._locked = self._locked, -1
        if fd >= 0:
            os.close(fd)

    def _is_replaced(self) -> bool:
        """Else it gets lines. Raises OSError if neither is possible."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return True
        if stat.S_ISCHR(found.st_mode) or stat.S_ISFIFO(found.st_mode) or own_stream(found):
            return False
        check_regular(self._path)
        check_writable(found)
        return True

    def _write(self) -> None:
        line = json.dumps(self._snapshot().to_dict()).encode() + b"\n"
        with _writing:
            if self._target is not None:
                self._replace(self._target, line)
            else:
                self._append(line)

    def _append(self, line: bytes) -> None:
        """Never waits for whoever reads; what nobody takes is left out."""
        try:
            stream = own_stream(self._path.stat())
            if stream:  # with the position that it has
                if select.select([], [stream], [], 0)[1]:
                    os.write(stream, line)
                return
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.EEXIST, "a file has taken its place")
                os.write(fd, line)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise

    def _replace(self, target: Path, data: bytes) -> None:
        self._check_place(target)
        partial = target.with_name(f".expert-stats.{os.getpid()}.{secrets.token_hex(4)}.partial")
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            lock(fd)
            if self._locked >= 0:
                os.fchmod(fd, stat.S_IMODE(os.fstat(self._locked).st_mode))
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            partial.replace(target)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        self._release()
        self._locked = fd

    def _check_place(self, target: Path) -> None:
        """What this run has not written there must stay: somebody moved it over our file, or made it since."""
        try:
            found = target.lstat()
        except FileNotFoundError:
            return
        if self._locked < 0 or not os.path.samestat(found, os.fstat(self._locked)):
            raise OSError(errno.EEXIST, "another file has taken its place, which would be lost")


def _is_statistics(head: bytes) -> bool:
    try:
        found = json.loads(head)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() >= _KEYS
