"""Reads for memory that the host cannot write to: into one of a few staging buffers, from there to where it belongs.

submit --(a buffer is free, else wait in line)--> reader fills it --> deliver(block) --> on_done
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ReadError

if TYPE_CHECKING:
    from ..format.layout import Layer
    from .reader import OnDone, Reader

__all__ = ["Deliver", "StagingPool"]

Deliver = Callable[[memoryview], None]
"""Copies a block to where it belongs, and returns when it is there; raises :class:`ReadError` if that fails."""


class _Request(NamedTuple):
    layer: int
    expert: int
    deliver: Deliver
    on_done: OnDone


class StagingPool:
    """``buffers``: writable, page-aligned, each at least as large as the largest block. Thread-safe."""

    def __init__(self, reader: Reader, layers: Sequence[Layer], buffers: Sequence[memoryview]) -> None:
        self._reader = reader
        self._layers = layers
        self._lock = threading.Lock()  # guards the next two
        self._free = list(buffers)
        self._waiting: deque[_Request] = deque()

    def submit(self, layer: int, expert: int, deliver: Deliver, on_done: OnDone) -> None:
        """Start to read an expert and return; ``deliver``, then ``on_done``, are called from a reader thread.

        ``on_done(error or None)`` is called exactly once; only if it gets None are the right bytes in place.
        """
        request = _Request(layer, expert, deliver, on_done)
        with self._lock:
            if not self._free:
                self._waiting.append(request)
                return
            buffer = self._free.pop()
        self._start(request, buffer)

    def _start(self, request: _Request, buffer: memoryview) -> None:
        block = buffer[: self._layers[request.layer].block_bytes]

        def done(error: ReadError | None) -> None:
            try:
                if error is None:
                    request.deliver(block)
            except ReadError as cause:
                error = cause
            try:
                request.on_done(error)
            finally:
                self._next(buffer)

        try:
            self._reader.submit(request.layer, request.expert, block, done)
        except Exception as cause:
            done(ReadError(f"the read of expert {request.expert} of layer {request.layer} could not start: {cause}"))

    def _next(self, buffer: memoryview) -> None:
        with self._lock:
            if not self._waiting:
                self._free.append(buffer)
                return
            request = self._waiting.popleft()
        self._start(request, buffer)
