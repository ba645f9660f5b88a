"""Keeps garbage from being collected inside a callback.

Garbage may hold another model. Its end waits for the GPU, which waits for the callback, which would wait for that end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_n_inside = 0
_was_enabled = False


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Cycles that nobody refers to are freed when the block is left. Several threads may be in it."""
    global _n_inside, _was_enabled
    with _lock:
        if _n_inside == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _n_inside += 1
    try:
        yield
    finally:
        with _lock:
            _n_inside -= 1
            if _n_inside == 0 and _was_enabled:
                gc.enable()


def _forget() -> None:
    """In a forked child: the threads inside are the parent's."""
    global _lock, _n_inside
    _lock = threading.Lock()
    if _n_inside > 0 and _was_enabled:
        gc.enable()
    _n_inside = 0


os.register_at_fork(after_in_child=_forget)
