"""The best any policy could have done, knowing the future.

    Belady        evicts what is used again last. Like a real cache, it keeps each missing expert in a slot.
    bypass_hits   may throw a missing expert away at once: after each acquire the best n_slots of what was there and
                  what came remain. No cache of this size has more hits, whatever it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pypack.policy_base import Ints, Keys, Policy, smallest

if TYPE_CHECKING:
    from pypack.budget import Pool
    from pypack.trace import Trace

__all__ = ["Belady", "bypass_hits", "future_of"]


class Belady(Policy):
    """``next_use[key]``: number of the next acquire that will ask for it; the replay keeps it right."""

    def __init__(self, n_keys: int) -> None:
        self.next_use = np.zeros(n_keys, np.int64)

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        return smallest(n, -self.next_use.take(candidates), candidates)


def future_of(start: NDArray[np.int64], keys: NDArray[np.intp]) -> NDArray[np.int64]:
    """[len(keys)] index of the next acquire that asks for the same key; len(start) if there is none."""
    event = np.repeat(np.arange(len(start) - 1), np.diff(start))
    order = np.argsort(keys, kind="stable")
    future = np.full(len(keys), len(start), np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    future[order[:-1][same]] = event[order[1:][same]]
    return future


def bypass_hits(trace: Trace, pools: Sequence[Pool]) -> tuple[int, int]:
    """(hits, hits of acquires for one token)."""
    trace = trace.only_acquires()
    keys = trace.keys().astype(np.intp)
    future = future_of(trace.start, keys)
    next_use = np.zeros(trace.n_keys, np.int64)
    is_there = np.zeros(trace.n_keys, np.bool_)
    n_slots, held = _by_layer(trace, pools)
    starts, layers, is_decode = trace.start.tolist(), trace.layer.tolist(), (trace.number <= trace.top_k).tolist()
    n_hits = n_decode_hits = 0
    for i, layer in enumerate(layers):
        wanted = keys[starts[i] : starts[i + 1]]
        next_use[wanted] = future[starts[i] : starts[i + 1]]
        there = is_there.take(wanted)
        n = int(np.count_nonzero(there))
        n_hits += n
        n_decode_hits += n * is_decode[i]
        if n == len(wanted):
            continue
        pool = n_slots[layer]
        both = np.concatenate((held[pool[0]], wanted[~there]))
        if len(both) > pool[1]:
            gone = smallest(len(both) - pool[1], -next_use.take(both), both)
            is_there[both] = True
            is_there[both[gone]] = False
            both = np.delete(both, gone)
        else:
            is_there[both] = True
        held[pool[0]] = both
    return n_hits, n_decode_hits


def _by_layer(trace: Trace, pools: Sequence[Pool]) -> tuple[dict[int, tuple[int, int]], list[Keys]]:
    """(number and slots of the pool) of each layer; what each pool holds: nothing."""
    pool_of_layer = {layer: (i, pool.n_slots) for i, pool in enumerate(pools) for layer in pool.layers}
    return pool_of_layer, [np.empty(0, np.intp) for _ in pools]
