"""What a cache policy is: it names the experts that leave when others must come in.

A policy sees native's exact statistics, but only when something is missing: a hit costs no Python call. ``now`` is
the number of the current acquire, ``last_use[key]`` that of the last one that asked for the expert, ``freq[key]``
how many did. Whether an expert was hit since it came in is ``freq[key]`` now against then.

Every missing expert needs a slot for its computation. To *bypass* the cache is to be the first to go afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .pool import Pool

Keys = NDArray[np.intp]
Ints = NDArray[np.int64]


class Policy(ABC):
    """The choice of victims. What it remembers is by key: who is in the cache, it learns from ``candidates``."""

    is_ranking = False
    """Whether ``victims`` only ranks: then it may be asked for more than leave, before something is missing."""

    def for_pool(self, pool: Pool, n_keys: int) -> Policy:
        """The policy of one pool of slots; ``n_keys``: length of the tables. Itself if it remembers nothing."""
        return self

    def coming(self, keys: Keys, freq: Ints, last_use: Ints, now: int) -> None:  # noqa: B027
        """These experts take slots now. Called before the victims are asked for, also where there are none."""

    @abstractmethod
    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        """Indices into ``candidates`` (keys) of the ``n`` to evict, the first to go first; n <= len(candidates).

        Experts in use are not among the candidates, unless it is asked for a ranking.
        """


class PoolPolicy(Policy):
    """A policy that remembers something, for each pool by itself."""

    def for_pool(self, pool: Pool, n_keys: int) -> Policy:
        policy = type(self)()
        policy._start(pool, n_keys)
        return policy

    @abstractmethod
    def _start(self, pool: Pool, n_keys: int) -> None:
        """Nothing has come in yet."""


def smallest(n: int, first: NDArray[Any], second: NDArray[Any]) -> Keys:
    """Indices of the n smallest by (first, second, index), in this order, without sorting everything."""
    if n <= 0:
        return np.arange(0)
    if n >= len(first):
        return np.lexsort((second, first))
    limit = np.partition(first, n - 1)[n - 1]
    (chosen,) = (first <= limit).nonzero()
    order: Keys = chosen[np.lexsort((second[chosen], first[chosen]))[:n]]
    return order
