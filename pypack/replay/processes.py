"""One function for many jobs, in forked processes: they share what it refers to instead of copying it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from ..errors import ExpertPackError

Job = TypeVar("Job")
Result = TypeVar("Result")

_function: Callable[[Any], Any]  # of a worker


def map_in_processes(function: Callable[[Job], Result], jobs: Sequence[Job], n_processes: int) -> list[Result]:
    """[len(jobs)] what it returns, in order; with one process, one job, or where none can be started, in this one.

    Raises what the function raises, :class:`ExpertPackError` if a process was killed.
    """
    n_processes = min(n_processes, len(jobs))
    if n_processes <= 1:
        return list(map(function, jobs))
    others = set(multiprocessing.active_children())
    try:
        processes = ProcessPoolExecutor(n_processes, multiprocessing.get_context("fork"), _start, (function,))
        processes.submit(os.getpid)  # starts all
    except (OSError, NotImplementedError):  # no semaphores (without /dev/shm), or a limit on processes
        for started in set(multiprocessing.active_children()) - others:
            started.kill()
        return list(map(function, jobs))
    try:
        futures = [processes.submit(_work, job) for job in jobs]
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise ExpertPackError("a process of the replay was killed: free memory, or replay a shorter run") from None
    finally:
        processes.shutdown(cancel_futures=True)  # map() cancels, too, but may do so while the pool is breaking


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process whose parent was killed would wait for jobs for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(job: Any) -> Any:
    return _function(job)
