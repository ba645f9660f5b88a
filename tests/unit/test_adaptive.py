"""The adaptive policy: what it ranks first where recency tells, where frequency does, and within a token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from llama_expert_pack.pypack.policy.adaptive import Adaptive
from llama_expert_pack.pypack.policy.pool import Pool

N_KEYS = 128

Acquire = Sequence[int]


def order_after(acquires: Sequence[Acquire], layers: tuple[int, ...] = (0,)) -> list[int]:
    """All keys that were used, the first to go first. One use a token in each layer; asked at each acquire."""
    policy = Adaptive().for_pool(Pool(4096, layers, N_KEYS, 0, 4, 0, len(layers)), N_KEYS)
    freq, last_use = np.zeros(N_KEYS, np.int64), np.zeros(N_KEYS, np.int64)
    ranked: list[int] = []
    for now, keys in enumerate(acquires, 1):
        freq[list(keys)] += 1
        last_use[list(keys)] = now
        used = np.flatnonzero(freq)
        policy.coming(np.array(keys, np.intp), freq, last_use, now)
        ranked = used[policy.victims(used, len(used), freq, last_use, now)].tolist()
    return ranked


FAVOURITES_AND_STRANGERS = [[key] for i in range(20) for key in (0, 20 + i)]
IN_RUNS = [[key] for key in range(20, 40) for _ in range(4)]


def test_where_favourites_come_back_a_stranger_leaves_first() -> None:
    order = order_after([*FAVOURITES_AND_STRANGERS, [0], [1], [2]])
    assert order[-1] == 0
    assert order.index(20) < order.index(39)  # of strangers, the one that was used longer ago


def test_where_experts_come_in_runs_the_favourite_of_before_leaves() -> None:
    order = order_after([*[[0]] * 8, *IN_RUNS])
    assert order.index(0) < order.index(38) < order.index(39)


def test_it_changes_its_mind() -> None:
    in_runs_at_last = order_after([*FAVOURITES_AND_STRANGERS, *[[key] for key in range(40, 60) for _ in range(4)]])
    assert in_runs_at_last.index(0) < in_runs_at_last.index(59)
    favourites_at_last = order_after([*IN_RUNS, *([key] for i in range(60) for key in (0, 40 + i))])
    assert favourites_at_last[-1] == 0


@pytest.mark.parametrize("layers", [(0, 1), (0,)], ids=["one pool", "a pool of the first layer"])
def test_who_was_passed_over_leaves_before_whose_turn_is_to_come(layers: tuple[int, ...]) -> None:
    """Keys 0 and 1 are of the first layer, 32 of the second; acquires of other pools' layers count, too."""
    tokens = [[key] for _ in range(10) for key in (0, 32)]
    order = order_after([*tokens, [1]], layers)
    assert order.index(0) < order.index(32)


def test_a_prompt_in_one_batch_changes_no_mind() -> None:
    batch = list(range(0, 60))
    for habit, kept in ((FAVOURITES_AND_STRANGERS, 0), (IN_RUNS, 39)):
        assert order_after([*habit, batch])[-1] == kept
        assert order_after([*habit, batch, [60]]).index(kept) > order_after([*habit, batch, [60]]).index(30)


def test_it_is_a_function_of_the_acquires() -> None:
    assert order_after(FAVOURITES_AND_STRANGERS) == order_after(FAVOURITES_AND_STRANGERS)
