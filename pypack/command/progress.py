"""Progress on stderr: a bar on a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any

from ..convert.progress import Progress

_LINE_INTERVAL_S = 5.0


class Bar:
    """A tqdm bar for a terminal: a :class:`Progress`."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Any = None

    def start(self, total_bytes: int, done_bytes: int) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]  # a server that starts does not wait for it

        self._bar = tqdm(
            total=total_bytes,
            initial=done_bytes,
            desc=self._label,
            unit="B",
            unit_scale=True,
            file=sys.stderr,
        )

    def advance(self, n_bytes: int) -> None:
        self._bar.update(n_bytes)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Lines:
    """A line every few seconds and one at the end, for logs: a :class:`Progress`."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._total = self._done = self._first = 0
        self._began = self._last = 0.0

    def start(self, total_bytes: int, done_bytes: int) -> None:
        self._total, self._done, self._first = total_bytes, done_bytes, done_bytes
        self._began = self._last = time.monotonic()

    def advance(self, n_bytes: int) -> None:
        self._done += n_bytes
        now = time.monotonic()
        if now - self._last >= _LINE_INTERVAL_S or self._done == self._total:
            self._last = now
            rate = (self._done - self._first) / max(now - self._began, 1e-9)
            print(
                f"{self._label}: {100 * self._done // max(self._total, 1)} % of {self._total / 1e9:.2f} GB, "
                f"{rate / 1e6:.0f} MB/s",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None: ...


def for_stderr(label: str) -> Progress:
    """A bar where stderr is a terminal, lines elsewhere; ``label`` stands before both."""
    return Bar(label) if sys.stderr.isatty() else Lines(label)
