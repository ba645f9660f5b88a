"""Keeps Python's signal handlers from raising inside a callback.

A callback runs on the thread that called llama_decode. If that is the main thread, Ctrl-C would raise there, tear
the callback apart between two of its steps, and get lost: an exception cannot pass through C.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # what signal wraps: conversions to enums took 20 us a decode
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_SIGNALS = tuple(
    map(int, (signal.SIGALRM, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT))
)
_put_aside: dict[int, Callable[[int, Any], Any]] = {}  # handlers, while the main thread is in a block


@contextlib.contextmanager
def held_back(stop: Callable[[], None] | None = None) -> Iterator[None]:
    """Signals that have a handler in Python get it when the block is left.

    ``stop`` is called, in the block, when one is Ctrl-C that will raise KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread() or _put_aside:
        yield  # handlers run on the main thread only, and may be held back already
        return
    came: list[tuple[int, Any]] = []
    handlers: dict[int, Callable[[int, Any], Any]] = {}

    def keep(number: int, frame: Any) -> None:
        came.append((number, frame))
        if stop is not None and handlers[number] is signal.default_int_handler:
            stop()

    try:
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                handlers[number] = _put_aside[number] = handler
                _signal.signal(number, keep)
        yield
    finally:
        for number, handler in handlers.items():
            _signal.signal(number, handler)
        _put_aside.clear()
        for number, frame in came:
            handlers[number](number, frame)


def _forget() -> None:
    """In a child that another thread forked: it is in no block."""
    for number, handler in _put_aside.items():
        _signal.signal(number, handler)
    _put_aside.clear()


os.register_at_fork(after_in_child=_forget)
