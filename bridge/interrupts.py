"""Keeps Python's signal handlers from raising inside a callback.

A callback runs on the thread that called llama_decode. If that is the main thread, Ctrl-C would raise there, tear
the callback apart between two of its steps, and get lost: an exception cannot pass through C.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # what signal wraps: conversions to enums took 20 us a decode
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_SIGNALS = tuple(
    map(int, (signal.SIGALRM, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT))
)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Signals that have a handler in Python get it when the block is left."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run on the main thread only
        return
    came: list[tuple[int, Any]] = []
    handlers: dict[int, Callable[[int, Any], Any]] = {}

    def keep(number: int, frame: Any) -> None:
        came.append((number, frame))

    try:
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                _signal.signal(number, keep)
        yield
    finally:
        for number, handler in handlers.items():
            _signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)
