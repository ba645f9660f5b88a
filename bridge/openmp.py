"""OpenMP's threads do not survive a fork: a child of a thread that has computed would wait for them for ever."""

from __future__ import annotations

import ctypes
import os

_SOFT = 1  # omp_pause_soft: threads end, settings stay


def _end_threads() -> None:
    """Of the thread that forks; it gets new ones when it computes next."""
    try:
        openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return  # nothing has computed, or with an OpenMP that takes care itself
    openmp.omp_pause_resource_all(_SOFT)


os.register_at_fork(before=_end_threads)
