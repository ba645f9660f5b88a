"""Chunks worked on by several threads, with results in the order of the chunks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ..errors import UsageError
from ..system.host_memory import host_memory_free
from .assemble import Chunk

T = TypeVar("T")

DEFAULT_JOBS = 4
MAX_JOBS = 6  # 65 MiB of buffers each, so resident memory stays below 512 MiB
_JOB_BYTES = 72 << 20
_SPARE_BYTES = 64 << 20  # for hashing, the page cache, and what others start meanwhile
_QUEUED_PER_JOB = 4


def check_jobs(jobs: int | None) -> int:
    """The number given; for None, as many jobs as memory allows, up to DEFAULT_JOBS. Raises UsageError."""
    if jobs is None:
        try:
            return jobs_for(host_memory_free())
        except (OSError, KeyError):  # no procfs
            return DEFAULT_JOBS
    if not 1 <= jobs <= MAX_JOBS:
        raise UsageError(f"jobs is {jobs}: choose 1 to {MAX_JOBS}")
    return jobs


def jobs_for(free_bytes: int) -> int:
    """Jobs that fit into this memory: at least one, at most DEFAULT_JOBS."""
    return max(1, min(DEFAULT_JOBS, (free_bytes - _SPARE_BYTES) // _JOB_BYTES))


def map_in_order(
    work: Callable[[Chunk], T], chunks: Iterable[Chunk], jobs: int, stop: threading.Event
) -> Generator[tuple[Chunk, T], None, None]:
    """Yields each chunk with what ``work`` made of it in one of ``jobs`` threads; raises what ``work`` raises.

    Close the iterator (``contextlib.closing``) before anything that ``work`` uses goes away: ``stop`` is set then,
    for long work to look at, and no thread runs afterwards.
    """
    pool = ThreadPoolExecutor(jobs)
    gate = _Gate(stop)
    pending: deque[tuple[Chunk, Future[T]]] = deque()
    try:
        for chunk in chunks:
            pending.append((chunk, pool.submit(gate.run, work, chunk)))
            if len(pending) >= _QUEUED_PER_JOB * jobs:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    finally:
        gate.close(pool)


class _Gate:
    """Knows what is running. The pool does not, if Ctrl-C came while it was starting a thread."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._changed = threading.Condition()
        self._n_running = 0

    def run(self, work: Callable[[Chunk], T], chunk: Chunk) -> T:
        with self._changed:
            if self._stop.is_set():
                raise UsageError("the work was stopped")
            self._n_running += 1
        try:
            return work(chunk)
        finally:
            with self._changed:
                self._n_running -= 1
                self._changed.notify_all()

    def close(self, pool: ThreadPoolExecutor) -> None:
        """Lets nothing in and waits for what runs, however often Ctrl-C is pressed meanwhile."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with self._changed:
                    self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                with self._changed:
                    self._changed.wait_for(lambda: self._n_running == 0)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
