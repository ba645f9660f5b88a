"""One function for many jobs, in forked processes: they share what it refers to instead of copying it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from ..errors import ExpertPackError

__all__ = ["map_in_processes"]

Job = TypeVar("Job")
Result = TypeVar("Result")

_function: Callable[[Any], Any]  # of a worker


def map_in_processes(function: Callable[[Job], Result], jobs: Sequence[Job], n_processes: int) -> list[Result]:
    """[len(jobs)] what it returns, in order; with one process, or one job, in this one.

    Raises what the function raises, :class:`ExpertPackError` if a process was killed.
    """
    n_processes = min(n_processes, len(jobs))
    if n_processes <= 1:
        return list(map(function, jobs))
    try:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(n_processes, context, _start, (function,)) as processes:
            return list(processes.map(_work, jobs))
    except BrokenProcessPool:
        raise ExpertPackError("a process of the replay was killed: free memory, or replay a shorter run") from None


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback


def _work(job: Any) -> Any:
    return _function(job)
