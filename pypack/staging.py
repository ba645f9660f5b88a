"""Reads for memory that the host cannot write to: into one of a few staging buffers, from there to where it belongs.

    submit --(a buffer is free, else wait in line)--> reader fills it part by part --> deliver(part) --> on_done

The buffers are the direct read's destination and the device copy's source, so no byte is copied on the host, and
the first parts are on the device while the last ones are still being read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pypack.errors import ReadError

if TYPE_CHECKING:
    from pypack.layout import Layer
    from pypack.reader import OnDone, Reader

__all__ = ["Deliver", "StagingPool"]

Deliver = Callable[[memoryview, int], None]
"""Takes a part of an expert, and where it starts in the block, to its place before it returns; raises if it cannot."""


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
        """Start to read an expert and return; ``deliver``, then ``on_done``, are called from reader threads.

        ``on_done(error or None)`` is called exactly once; only if it gets None are the delivered bytes right.
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

        def arrived(offset: int, length: int) -> None:
            request.deliver(block[offset : offset + length], offset)

        def done(error: ReadError | None) -> None:
            try:
                request.on_done(error)
            finally:
                self._next(buffer)

        try:
            self._reader.submit(request.layer, request.expert, block, done, arrived)
        except Exception as cause:
            done(ReadError(f"the read of expert {request.expert} of layer {request.layer} could not start: {cause}"))

    def _next(self, buffer: memoryview) -> None:
        with self._lock:
            if not self._waiting:
                self._free.append(buffer)
                return
            request = self._waiting.popleft()
        self._start(request, buffer)
