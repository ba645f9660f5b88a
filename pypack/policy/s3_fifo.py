"""s3-fifo: two queues, first in, first out: small (1/10 of the slots) and main. Hits are noticed when a victim is sought.

Out of small: to main if it was hit twice, else it leaves and is remembered. Out of main: back in with one hit less, or
it leaves if there is none. Remembered ones come into main.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from .base import Ints, Keys, PoolPolicy
from .pool import Pool


class S3Fifo(PoolPolicy):
    def _start(self, pool: Pool, n_keys: int) -> None:
        self._in_main = np.zeros(n_keys, np.bool_)
        self._stamp = np.zeros(n_keys, np.int64)  # order of arrival in its queue
        self._zero = np.zeros(n_keys, np.int64)  # freq at which it counts no hit
        self._n_stamps = 0
        self._ghosts: dict[int, None] = {}
        self._n_small_max = max(1, pool.n_slots // 10)
        self._n_ghosts_max = pool.n_slots

    def coming(self, keys: Keys, freq: Ints, last_use: Ints, now: int) -> None:
        for key in keys.tolist():
            self._enter(key, key in self._ghosts, int(freq[key]))
            self._ghosts.pop(key, None)

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        main = self._in_main.take(candidates)
        order = np.argsort(self._stamp.take(candidates))
        queues = {is_main: deque(order[main[order] == is_main].tolist()) for is_main in (False, True)}
        keys = candidates.tolist()
        chosen: list[int] = []
        while len(chosen) < n:
            in_main = bool(queues[True]) and len(queues[False]) <= self._n_small_max
            index = queues[in_main].popleft()
            key = keys[index]
            n_hits = min(int(freq[key] - self._zero[key]), 3)
            if n_hits > (0 if in_main else 1):
                self._enter(key, True, int(freq[key]) - (n_hits - 1 if in_main else 0))
                queues[True].append(index)
            else:
                chosen.append(index)
                if not in_main:
                    self._remember(key)
        return np.array(chosen, np.intp)

    def _enter(self, key: int, in_main: bool, zero: int) -> None:
        self._n_stamps += 1
        self._in_main[key], self._stamp[key], self._zero[key] = in_main, self._n_stamps, zero

    def _remember(self, key: int) -> None:
        self._ghosts[key] = None
        if len(self._ghosts) > self._n_ghosts_max:
            del self._ghosts[next(iter(self._ghosts))]
