"""Keeps garbage from being collected inside a callback.

Garbage may hold another model. Its end waits for the GPU, which waits for the callback, which would wait for that end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.RLock()  # what is collected in the middle may close a model, which comes here
_thread = threading.local()  # depth: blocks that this thread is in
_n_inside = 0
_was_enabled = False


@contextlib.contextmanager
def held_back(*, may_collect: bool = True) -> Iterator[None]:
    """Cycles that nobody refers to are freed when the block is left. Several threads may be in it.

    Where others never let the last one leave, each collects what is due when it does. ``may_collect`` False: not on this thread.
    """
    global _n_inside, _was_enabled
    with _lock:
        if _n_inside == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _n_inside += 1
    depth = _thread.__dict__.setdefault("depth", 0)
    _thread.depth = depth + 1
    try:
        yield
    finally:
        _thread.depth = depth
        with _lock:
            _n_inside -= 1
            others = _n_inside > 0
            if not others and _was_enabled:
                gc.enable()
        if others and _was_enabled and depth == 0 and may_collect:
            _collect_what_is_due()


def _collect_what_is_due() -> None:
    """As Python does by itself: a generation whose threshold is passed, with the younger ones."""
    passed = [i for i, (n, limit) in enumerate(zip(gc.get_count(), gc.get_threshold(), strict=True)) if n > limit > 0]
    if passed and passed[0] == 0:
        gc.collect(max(i for i in passed if passed[: i + 1] == list(range(i + 1))))


def _forget() -> None:
    """In a forked child: the threads inside are the parent's."""
    global _lock, _n_inside
    _lock = threading.RLock()
    if _n_inside > 0 and _was_enabled:
        gc.enable()
    _n_inside = 0


os.register_at_fork(after_in_child=_forget)
