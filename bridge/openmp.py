"""What libgomp, whose threads compute on the CPU, must know of reads and of forks."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_SOFT = 1  # omp_pause_soft: threads end, settings stay
_VARIABLE = "GOMP_SPINCOUNT"
_SPIN = "40000"


@contextlib.contextmanager
def short_spin() -> Iterator[None]:
    """A libgomp that is loaded meanwhile lets idle threads spin for a seventh of its default, unless the user says otherwise.

    With a pack, threads of a computation wait for reads, which need a processor. By default they spin for milliseconds: as long
    as a read takes. Between two operations of a step the seventh is plenty.
    """
    if {_VARIABLE, "OMP_WAIT_POLICY"} & os.environ.keys():
        yield
        return
    os.environ[_VARIABLE] = _SPIN
    try:
        yield
    finally:
        del os.environ[_VARIABLE]  # it is not for the programs that this one starts


def _end_threads() -> None:
    """Of the thread that forks; it gets new ones when it computes next. OpenMP's threads do not survive a fork: a child of a
    thread that has computed would wait for them for ever."""
    try:
        openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return  # nothing has computed, or with an OpenMP that takes care itself
    openmp.omp_pause_resource_all(_SOFT)


os.register_at_fork(before=_end_threads)
