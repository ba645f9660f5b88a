"""adaptive, the default: the expert leaves that is least likely to be used at its layer's next turn.

How likely that is, four averages of its use by token say, each with its own memory: of the last token alone (recency) up to
hundreds of tokens (frequency). The likelihood is their weighted mean, and the weights are learned, whether the expert is in
the cache or not: each use is credited to the averages in proportion to what each expected of it, and an average's weight
is its share of the recent credit (the EM algorithm for a mixture, on line). So a use that only frequency expected speaks
for frequency. The size of the cache plays no part: the likeliest experts are the ones to keep in any.

A prompt's batch counts as one token: its experts share the uses of one. Of equals the least recently used leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .base import Ints, Keys, PoolPolicy, smallest

if TYPE_CHECKING:
    from .pool import Pool

__all__ = ["Adaptive"]


class Adaptive(PoolPolicy):
    is_ranking = True
    KEPT = (0.0, 3 / 4, 31 / 32, 255 / 256)  # of each average's past at a new token; the first is the last token alone
    CREDIT_KEPT = 31 / 32
    CREDIT_LEAST = 1e-6  # uses: who was wrong for long may be right again
    SUM_LEAST = 1e-100  # uses: what is less is none, or it would become too small to divide by and stay so for ever

    def _start(self, pool: Pool, n_keys: int) -> None:
        n = len(self.KEPT)
        self._n_layers = round(len(pool.layers) * n_keys / pool.n_experts)  # of all pools: acquires of a token
        self._n_per_token = max(1, pool.n_per_token)
        self._kept = np.array(self.KEPT)[:, None]
        self._sums = np.zeros((n, n_keys))  # [average, key] uses, old ones counting less
        self._tokens = np.zeros((n, 1))  # [average, 1] tokens, counted alike
        self._credit = np.full((n, 1), self._n_per_token / n)  # [average, 1] uses
        self._counted = 0  # number of the acquire up to which uses are in the sums
        self._freq = np.zeros(n_keys, np.int64)  # as it was then
        self._habit = np.zeros(n_keys)  # [key] likelihood without what the last token says
        self._again = 1 / n  # what that adds for the experts it used

    def victims(self, candidates: Keys, n: int, freq: Ints, last_use: Ints, now: int) -> Keys:
        if now - self._counted >= self._n_layers:
            self._count(freq, now)
        used = last_use.take(candidates)
        # Used at its layer's last turn. The layer whose turn is next counts as after it: something will be missing there,
        # and who is used there stays in any case.
        in_last = used > now + 1 - self._n_layers
        again = self._again * self._share_of_token(int(np.count_nonzero(in_last)))
        return smallest(n, self._habit.take(candidates) + again * in_last, used)

    def _count(self, freq: Ints, now: int) -> None:
        """Put what was used since the last count, usually one token's experts, into credit and averages."""
        uses = freq - self._freq
        (keys,) = uses.nonzero()
        rates = uses[keys] * self._share_of_token(int(uses.sum()))
        expected = self._credit / np.maximum(self._tokens, 1) * self._sums[:, keys]
        whole = expected.sum(0)
        known = whole > 0  # not those of first uses
        earned = (expected[:, known] / whole[known] * rates[known]).sum(1, keepdims=True)
        self._credit = np.maximum(self._credit * self.CREDIT_KEPT + earned, self.CREDIT_LEAST)
        self._sums *= self._kept
        self._sums *= self._sums >= self.SUM_LEAST
        self._sums[:, keys] += rates
        self._tokens = self._tokens * self._kept + 1
        weights = self._credit / self._credit.sum()
        # no matrix product: its last digits depend on the machine, and replays must agree with runs
        self._habit = (weights[1:] / self._tokens[1:] * self._sums[1:]).sum(0)
        self._again = float(weights[0, 0])
        self._freq += uses
        self._counted = now

    def _share_of_token(self, n_uses: int) -> float:
        """What each of so many uses counts: together never more than a token's."""
        return min(1.0, self._n_per_token / max(1, n_uses))
