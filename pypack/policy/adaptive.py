"""adaptive, the default: the expert leaves that is least likely to be used at its layer's next turn.

An expert's use is averaged over the tokens so far in several ways, from the last token alone (recency) to nearly all
of them (frequency). The likelihood is the mean of these averages by weights, which are learned from what is used, in the
cache or not: each use is credited to the averages in proportion to what they had expected of it, and an average's weight is
its share of the recent credit (the EM algorithm for a mixture, on line). So a use that only frequency expected speaks for
frequency. The size of the cache plays no part: the likeliest experts are the ones to keep in any.

An expert whose layer had its turn since the last count, without using it, is already judged as after that: where the
cache holds less than a token uses, those that were passed over leave before those whose turn is still to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .base import Ints, Keys, PoolPolicy, smallest

if TYPE_CHECKING:
    from .pool import Pool

__all__ = ["Adaptive"]


class Adaptive(PoolPolicy):
    is_ranking = True
    KEPT = (
        0.0,
        3 / 4,
        31 / 32,
        255 / 256,
    )  # of an average's past, at each token; exact in binary, as replays must agree
    CREDIT_KEPT = 31 / 32

    def _start(self, pool: Pool, n_keys: int) -> None:
        self._kept = np.array(self.KEPT)[:, None]
        self._sums = np.zeros((len(self.KEPT), n_keys))  # [average, key] uses, old ones counting less
        self._tokens = np.zeros((len(self.KEPT), 1))  # [average, 1] tokens, counted alike
        self._n_per_token = max(1, pool.n_per_token)
        self._credit = np.full((len(self.KEPT), 1), self._n_per_token / len(self.KEPT))  # [average, 1] uses
        self._n_layers_least = len(pool.layers)
        self._n_layers = self._n_layers_least  # acquires of a token; those of other pools are among them
        self._counted = 0  # number of the acquire up to which uses are in the sums
        self._freq = np.zeros(n_keys, np.int64)  # as it was then
        self._last_use = np.zeros(n_keys, np.int64)
        self._shortest = np.iinfo(np.int64).max  # acquires between two uses of an expert
        self._turn = np.zeros(n_keys, np.int64)  # number of the acquire at which its layer is next
        self._likely = np.zeros((2, n_keys))  # [turn came, key] likelihood if not used since the count
        self._of_use = 1.0  # what a use since the count adds

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        if now - self._counted >= self._n_layers:
            self._count(freq, last_use, now)
        used = last_use.take(candidates)
        before, after = self._likely
        had_turn = self._turn.take(candidates) <= now
        likely = np.where(had_turn, after.take(candidates), before.take(candidates))
        return smallest(n, likely + self._of_use * (used > self._counted), used)

    def _count(self, freq: Ints, last_use: Ints, now: int) -> None:
        """Put what was used since the last count, usually one token's experts, into credit and sums."""
        uses = freq - self._freq
        (keys,) = uses.nonzero()
        self._learn(keys, uses[keys])
        self._time_a_token(keys, last_use)
        self._sums *= self._kept
        self._sums += uses / max(1, (now - self._counted) // self._n_layers)
        self._tokens = self._tokens * self._kept + 1
        self._expect(last_use, now)
        self._freq[:], self._last_use[:], self._counted = freq, last_use, now

    def _learn(self, keys: Keys, uses: Ints) -> None:
        """Credit the averages. A prompt's batch counts as one token."""
        expected = self._weights() * self._sums[:, keys] / np.maximum(self._tokens, 1)
        whole = expected.sum(0)
        known = whole > 0  # not those of first uses
        earned = (expected[:, known] * (uses[known] / whole[known])).sum(1, keepdims=True)
        scale = min(1.0, self._n_per_token / max(1, int(uses.sum())))
        self._credit = self._credit * self.CREDIT_KEPT + scale * earned

    def _time_a_token(self, keys: Keys, last_use: Ints) -> None:
        """A layer's turns are a token apart: the shortest time between two uses of one expert."""
        again = keys[self._last_use[keys] > 0]
        if len(again):
            self._shortest = min(self._shortest, int((last_use[again] - self._last_use[again]).min()))
            self._n_layers = max(self._n_layers_least, self._shortest)

    def _expect(self, last_use: Ints, now: int) -> None:
        weights = self._weights()
        of_token = weights / (self._tokens * self._kept + 1)  # of one more token, for each of its uses
        self._likely[0] = (weights / self._tokens * self._sums).sum(0)
        self._likely[1] = (of_token * self._kept * self._sums).sum(0)
        self._of_use = float(of_token.sum())
        self._turn = now + self._n_layers - (now - last_use) % self._n_layers

    def _weights(self) -> NDArray[np.float64]:
        """[average, 1]"""
        weights: NDArray[np.float64] = self._credit / self._credit.sum()
        return weights
