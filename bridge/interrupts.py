"""Keeps Python's signal handlers from raising inside a callback.

A callback runs on the thread that called llama_decode. If that is the main thread, Ctrl-C would raise there, tear
the callback apart between two of its steps, and get lost: an exception cannot pass through C.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_SIGNALS = (signal.SIGALRM, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Signals that have a handler in Python get it when the block is left."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run on the main thread only
        return
    came: list[tuple[int, Any]] = []
    handlers: dict[signal.Signals, Callable[[int, Any], Any]] = {}
    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for came_number, frame in came:
            handlers[signal.Signals(came_number)](came_number, frame)
