"""Which experts leave the cache when others must come in.

A policy scores candidates from native's exact statistics; the lowest scores are evicted. ``now`` is the
number of the current acquire, ``last_use[key]`` that of the last one that asked for the expert, ``freq[key]``
how many did, and age = now - last_use.

    Lru                 evict the smallest last_use;          ties: the smallest freq
    FreqAge (default)   evict the smallest freq / (age + 1);  ties: the smallest last_use
    FreqThenRecency     evict the smallest freq;              ties: the smallest last_use   (SGLang's rule)

Ties beyond these are broken arbitrarily, but the same way each time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypack.errors import UsageError

__all__ = ["DEFAULT_POLICY", "POLICIES", "FreqAge", "FreqThenRecency", "Lru", "Policy", "make_policy"]


class Policy(ABC):
    """The choice of victims. Stateless: all it knows are the shared tables."""

    @abstractmethod
    def victims(
        self,
        candidates: NDArray[np.intp],
        n: int,
        freq: NDArray[np.int64],
        last_use: NDArray[np.int64],
        now: int,
    ) -> NDArray[np.intp]:
        """Indices into ``candidates`` (keys) of the ``n`` to evict, in any order; n <= len(candidates)."""


class Lru(Policy):
    def victims(
        self,
        candidates: NDArray[np.intp],
        n: int,
        freq: NDArray[np.int64],
        last_use: NDArray[np.int64],
        now: int,
    ) -> NDArray[np.intp]:
        return _smallest(n, last_use.take(candidates), freq.take(candidates))


class FreqAge(Policy):
    def victims(
        self,
        candidates: NDArray[np.intp],
        n: int,
        freq: NDArray[np.int64],
        last_use: NDArray[np.int64],
        now: int,
    ) -> NDArray[np.intp]:
        used = last_use.take(candidates)
        return _smallest(n, freq.take(candidates) / (now - used + 1), used)


class FreqThenRecency(Policy):
    def victims(
        self,
        candidates: NDArray[np.intp],
        n: int,
        freq: NDArray[np.int64],
        last_use: NDArray[np.int64],
        now: int,
    ) -> NDArray[np.intp]:
        return _smallest(n, freq.take(candidates), last_use.take(candidates))


def _smallest(n: int, first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.intp]:
    """Indices of the n smallest by (first, second), without sorting everything."""
    if n <= 0 or n >= len(first):
        return np.arange(len(first) if n > 0 else 0)
    limit = np.partition(first, n - 1)[n - 1]
    chosen = np.flatnonzero(first <= limit)
    if len(chosen) == n:
        return chosen
    is_tied = first[chosen] == limit
    below, tied = chosen[~is_tied], chosen[is_tied]
    n_tied = n - len(below)
    return np.concatenate((below, tied[np.argpartition(second[tied], n_tied - 1)[:n_tied]]))


POLICIES: dict[str, type[Policy]] = {"freq-age": FreqAge, "freq-recency": FreqThenRecency, "lru": Lru}
DEFAULT_POLICY = "freq-age"


def make_policy(name: str) -> Policy:
    """The policy of that name; :class:`UsageError` lists the names if there is none."""
    if name not in POLICIES:
        raise UsageError(f"there is no cache policy {name!r}: choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
