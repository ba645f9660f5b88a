"""The adaptive policy: what leaves first where recency tells, where frequency does, within a token and after a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llama_expert_pack.pypack.policy.adaptive import Adaptive
from llama_expert_pack.pypack.policy.base import Policy
from llama_expert_pack.pypack.policy.pool import Pool

N_EXPERTS = 128  # of a layer

Acquire = Sequence[int]


def order_after(
    acquires: Sequence[Acquire], n_layers: int = 1, n_others: int = 0, top_k: int = 1, n_asked: int | None = None
) -> list[int]:
    """All keys of the pool that were used, the first to go first. ``n_others``: layers of other pools, keys after its own.

    It is asked at each acquire for ``n_asked`` of them, for all if None.
    """
    n_keys = N_EXPERTS * n_layers
    pool = Pool(4096, tuple(range(n_layers)), n_keys, 0, 4, 0, n_layers * top_k)
    n_all = n_keys + N_EXPERTS * n_others
    policy: Policy = Adaptive().for_pool(pool, n_all)
    freq, last_use = np.zeros(n_all, np.int64), np.zeros(n_all, np.int64)
    used = np.zeros(0, np.intp)
    for now, keys in enumerate(acquires, 1):
        freq[list(keys)] += 1
        last_use[list(keys)] = now
        used = np.flatnonzero(freq[:n_keys])
        policy.victims(used, len(used) if n_asked is None else min(n_asked, len(used)), freq, last_use, now)
    order: list[int] = used[policy.victims(used, len(used), freq, last_use, len(acquires))].tolist()
    return order


FAVOURITE_AND_STRANGERS = [[key] for i in range(20) for key in (0, 20 + i)]
IN_RUNS = [[key] for key in range(20, 40) for _ in range(4)]


def test_where_a_favourite_comes_back_a_stranger_leaves_first() -> None:
    order = order_after([*FAVOURITE_AND_STRANGERS, [0], [1], [2]])
    assert order[-1] == 0
    assert order.index(20) < order.index(39)  # of strangers, the one that was used longer ago


def test_where_experts_come_in_runs_the_favourite_of_before_leaves() -> None:
    order = order_after([*[[0]] * 8, *IN_RUNS])
    assert order.index(0) < order.index(38) < order.index(39)


def in_three_layers(keys: Sequence[int]) -> list[Acquire]:
    return [[layer * N_EXPERTS + key] for key in keys for layer in range(3)]


RUNS_IN_THREE_LAYERS = in_three_layers([key for key in range(20, 40) for _ in range(4)])
FAVOURITE_IN_THREE_LAYERS = in_three_layers([key for i in range(20) for key in (0, 20 + i, 40 + i, 60 + i)])


def favourite_stays_longer(acquires: Sequence[Acquire]) -> bool:
    """Than one that is used now for the first time."""
    order = order_after([*acquires, [100]], n_layers=3)
    return order.index(0) > order.index(100)


def test_it_learns_and_changes_its_mind() -> None:
    assert favourite_stays_longer(FAVOURITE_IN_THREE_LAYERS)
    assert not favourite_stays_longer([*FAVOURITE_IN_THREE_LAYERS, *RUNS_IN_THREE_LAYERS])
    assert favourite_stays_longer([*RUNS_IN_THREE_LAYERS, *FAVOURITE_IN_THREE_LAYERS])


def test_who_was_passed_over_leaves_before_whose_turn_is_to_come() -> None:
    """The first layer's turn has come, the second's is next: what is missing there decides that its expert is not used."""
    order = order_after([*RUNS_IN_THREE_LAYERS, [1]], n_layers=3)
    assert order[-4:] == [39, N_EXPERTS + 39, 1, 2 * N_EXPERTS + 39]


def test_layers_of_other_pools_have_turns_too() -> None:
    next_token = [[1], [N_EXPERTS + 1], [2 * N_EXPERTS + 1]]
    order = order_after([*RUNS_IN_THREE_LAYERS, *next_token], n_layers=2, n_others=1)
    assert order[-4:] == [1, 39, N_EXPERTS + 39, N_EXPERTS + 1]


def test_a_prompt_in_one_batch_changes_no_mind() -> None:
    batch = list(range(60))
    for habit, kept in ((FAVOURITE_AND_STRANGERS, 0), (IN_RUNS, 39)):
        assert order_after([*habit, batch])[-1] == kept
        assert order_after([*habit, batch, [60]]).index(kept) > 55


def test_a_batch_of_many_tokens_counts_no_more_than_one_token() -> None:
    once = [[0, 1], [0, 2], [0, 3], [0, 4]]
    batches = [list(range(5, 105))] * 2
    order = order_after([*once, *batches, [105, 106], [0, 107]], top_k=2)
    assert order.index(1) > order.index(104)


def test_what_it_learns_does_not_depend_on_what_it_is_asked() -> None:
    acquires = [*FAVOURITE_AND_STRANGERS, *IN_RUNS, list(range(60)), [1], [0]]
    assert order_after(acquires, n_asked=1) == order_after(acquires, n_asked=0) == order_after(acquires)


def test_nothing_but_new_experts() -> None:
    assert order_after([[key] for key in range(100)]) == list(range(100))


def test_what_was_used_ages_ago_may_be_used_again() -> None:
    """An average of it that only became ever smaller would be too small to divide by, or stay at the smallest number."""

    class Forgetful(Adaptive):
        KEPT = (0.0, 3 / 4, 3 / 4, 3 / 4)  # 3000 tokens are ages

    policy = Forgetful().for_pool(Pool(4096, (0,), 8, 0, 4, 0, 1), 8)
    freq, last_use = np.zeros(8, np.int64), np.zeros(8, np.int64)
    with np.errstate(all="raise", under="ignore"):
        for now in range(1, 6000):
            key = 0 if now in (1, 2, 5900) else now % 3 + 1
            freq[key] += 1
            last_use[key] = now
            ranked = policy.victims(np.arange(4), 4, freq, last_use, now)
            assert len(ranked) == 4
    assert np.isfinite(policy._credit).all() and (policy._credit >= Adaptive.CREDIT_LEAST).all()  # type: ignore[attr-defined]
    assert policy._sums[1:, 1:4].all() and not policy._sums[:, 4:].any()  # type: ignore[attr-defined]
