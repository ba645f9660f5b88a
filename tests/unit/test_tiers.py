"""Who of a pool goes up to the device and who down to host memory."""

from __future__ import annotations

import numpy as np
import pytest

from llama_expert_pack.pypack.placement.tiers import MOVES, NONE, TierPlan

N_KEYS = 40


class Pool:
    """Slot i holds expert i; the first are on the device."""

    def __init__(self, n_device: int) -> None:
        self.plan = TierPlan(np.arange(N_KEYS), N_KEYS)
        self.freq = np.zeros(N_KEYS, np.int64)
        self.owner = np.arange(N_KEYS)
        self.in_place = np.repeat([0, 1], [n_device, N_KEYS - n_device]).astype(np.uint8)

    def token(self, *keys: int, times: int = 1) -> tuple[list[int], list[int]]:
        """What goes up and what down after a token that used these."""
        self.freq[list(keys)] += times
        moves = np.full((2, MOVES), 7, np.int32)
        self.plan.plan(self.freq, self.owner, self.in_place, moves[0], moves[1])
        up, down = ([slot for slot in row if slot != NONE] for row in moves.tolist())
        assert len(up) == len(down) and (moves[:, len(up) :] == NONE).all()
        return up, down


def test_what_is_used_more_takes_the_place_of_what_is_used_less() -> None:
    pool = Pool(n_device=3)
    for _ in range(20):
        up, down = pool.token(0, 1, 5, 6)
    assert sorted(up) == [5], "two on the device are used as often"
    assert down == [2]
    for _ in range(20):
        up, down = pool.token(5, 6, 7)
    assert set(up) == {5, 6, 7} and set(down) == {0, 1, 2} and down[0] == 2, "first what is used least"


def test_a_use_or_two_move_nothing() -> None:
    pool = Pool(n_device=3)
    assert pool.token(5) == ([], []) == pool.token(5, 6)


def test_a_prompt_counts_as_one_token() -> None:
    pool = Pool(n_device=3)
    assert pool.token(*range(N_KEYS), times=500) == ([], [])
    assert pool.token(5, times=500) == ([], [])


def test_free_slots_and_full_sides() -> None:
    pool = Pool(n_device=3)
    pool.owner[2] = pool.owner[39] = NONE
    for _ in range(20):
        up, down = pool.token(5, 6)
    assert set(up) == {5, 6} and set(down) == {0, 1}, "nothing is in 2 that could leave"
    everywhere = Pool(n_device=N_KEYS)
    for _ in range(20):
        assert everywhere.token(5) == ([], [])


@pytest.mark.parametrize("n_device", [1, 20, 39])
def test_no_more_than_fits_the_table(n_device: int) -> None:
    pool = Pool(n_device)
    for _ in range(30):
        up, down = pool.token(*range(n_device, N_KEYS))
    assert len(up) == min(MOVES, n_device, N_KEYS - n_device)
    assert not set(up) & set(down)
