"""A file that always holds the latest statistics, for people and monitors that watch a running process."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

from pypack.counters import ExpertStats
from pypack.errors import UsageError

__all__ = ["StatsWriter"]

_log = logging.getLogger(__name__)


class StatsWriter:
    """Writes ``snapshot()`` as JSON to ``path`` now, every ``interval_s`` seconds and at :meth:`close`.

    The file is replaced, never half written. A path that cannot be written raises :class:`UsageError` here;
    a write that fails later is logged, so that a full disk does not stop the model.
    """

    def __init__(self, path: str | os.PathLike[str], interval_s: float, snapshot: Callable[[], ExpertStats]) -> None:
        self._path = Path(path)
        self._snapshot = snapshot
        if not math.isfinite(interval_s) or interval_s <= 0:
            raise UsageError(f"the statistics interval must be a number of seconds above 0, not {interval_s}")
        try:
            self._write()
        except OSError as error:
            raise UsageError(
                f"{self._path}: the statistics file cannot be written: {error.strerror}; "
                "give a file in a folder that exists and is writable"
            ) from error
        self._pid = os.getpid()
        self._interval_s = interval_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="expert-stats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the last state and stop. Further calls do nothing, as in a forked child: the file is the parent's."""
        if os.getpid() != self._pid:
            return
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            closing = self._closing.wait(self._interval_s)
            try:
                self._write()
            except OSError as error:
                _log.warning("%s: the statistics file could not be written: %s", self._path, error.strerror)
            if closing:
                return

    def _write(self) -> None:
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(self._snapshot().to_dict()) + "\n", encoding="utf-8")
            partial.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
