"""What the cache did, counted.

The numbers live in one int64 array that native code and this package both write; its layout is
``enum expert_counter`` of ``native/include/expert_provider.h``, which says who writes which number.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Counter(IntEnum):
    """Indices into :attr:`Counters.array`: the names and order of ``enum expert_counter``."""

    ACQUIRES = 0
    HITS = 1
    MISSES = 2
    EVICTIONS = 3
    LOADS = 4
    READ_BYTES = 5
    H2D_BYTES = 6
    PROVIDER_CALLS = 7
    WAIT_NS = 8
    IO_ERRORS = 9
    IO_RETRIES = 10
    FALLBACKS = 11
    FAILURES = 12
    HOST_HITS = 13
    HOST_BYTES = 14
    MOVES_UP = 15
    MOVES_DOWN = 16


@dataclass(frozen=True)
class ExpertStats:
    """The counters at one moment. Hits, misses, evictions and loads are of unique experts of a layer, not of tokens."""

    acquires: int  # a layer's experts looked up for a batch
    hits: int  # experts that were in a slot
    misses: int  # experts that were not
    evictions: int
    loads: int  # experts that were read into a slot
    read_bytes: int  # from the pack
    h2d_bytes: int  # copied to GPUs
    provider_calls: int
    wait_ns: int  # computation waited for experts, and for the choice of slots
    io_errors: int  # reads that failed or had a wrong checksum
    io_retries: int  # of these, tried again
    fallbacks: int  # reads without direct I/O
    failures: int  # decodes that failed
    host_hits: int  # of the hits, those that a GPU read in host memory
    host_bytes: int  # of their blocks
    moves_up: int  # experts that went from there to a GPU, in the background
    moves_down: int  # experts that went from a GPU to there

    @property
    def hit_rate(self) -> float:
        """Share of the wanted experts that were in a slot, 0..1; 0 before the first acquire."""
        wanted = self.hits + self.misses
        return self.hits / wanted if wanted else 0.0

    @property
    def read_bytes_per_acquire(self) -> float:
        """Bytes read from the pack for each layer looked up; 0 before the first acquire."""
        return self.read_bytes / self.acquires if self.acquires else 0.0

    @property
    def wait_s(self) -> float:
        """Seconds that computation waited for experts."""
        return self.wait_ns / 1e9

    def since(self, earlier: ExpertStats) -> ExpertStats:
        """What was counted between ``earlier`` and this moment."""
        return ExpertStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def plus(self, other: ExpertStats) -> ExpertStats:
        """What both counted."""
        return ExpertStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def to_dict(self) -> dict[str, int | float]:
        """The counters and what follows from them, as plain numbers."""
        counted: dict[str, int | float] = {f.name: getattr(self, f.name) for f in fields(self)}
        return counted | {
            "hit_rate": self.hit_rate,
            "read_bytes_per_acquire": self.read_bytes_per_acquire,
            "wait_s": self.wait_s,
        }


class Counters:
    """The shared array (``array``: int64, one entry a :class:`Counter`) and the lock of our own writers."""

    def __init__(self) -> None:
        self.array: NDArray[np.int64] = np.zeros(len(Counter), dtype=np.int64)
        self._lock = threading.Lock()

    def add(self, counter: Counter, n: int = 1) -> None:
        """Count ``n`` more. From any thread; only for counters that the provider writes."""
        with self._lock:
            self.array[counter] += n

    def snapshot(self) -> ExpertStats:
        """The numbers now."""
        return ExpertStats(*self.array.tolist())
