"""How many tokens of a prompt are computed at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_expert_pack.pypack.format.layout import Layer, Weight, lay_out_block
from llama_expert_pack.pypack.placement.batch import LEAST, MOST, Held, choose_batch, pass_bytes

WHOLE = 1000


def chosen(most: int, taken_by: float, *, room: int = 800, ram: int = 0, whole: int = WHOLE) -> int:
    """With a device that has ``room``, of which ``taken_by`` for each token of a batch goes."""

    def held(n: int) -> Held | None:
        left = int(room - taken_by * n)
        return Held((min(left, whole),), min(left + ram, whole)) if left > 0 else None

    return choose_batch(most, whole, held)


def test_the_largest_beside_which_most_of_the_experts_memory_is_left() -> None:
    assert chosen(100_000, 0.0) == MOST
    assert chosen(6000, 0.0) == 6000, "a context of 6000 tokens never has more in a batch"
    # 800 less 1/20 a token: 774 at 512 tokens, of which 580 must be left
    assert chosen(100_000, 1 / 20) == 4096
    assert chosen(4000, 1 / 20) == 4000
    assert chosen(100_000, 1 / 10) == 2048
    assert chosen(100_000, 1 / 3) == LEAST


def test_where_all_experts_have_room_they_keep_it() -> None:
    assert chosen(100_000, 1 / 20, ram=400) == 2048, "774 of 1000 on the device, the rest beside it: 600 must stay"
    assert chosen(100_000, 1 / 20, ram=200) == 4096, "not all have room anyway"


def test_where_all_are_where_they_are_computed_batches_are_llama_cpps() -> None:
    assert chosen(100_000, 0.0, room=WHOLE) == LEAST


@pytest.mark.parametrize("most", [1, 100, LEAST])
def test_short_contexts_have_short_batches(most: int) -> None:
    assert chosen(most, 0.0) == most


def test_no_room_at_all_is_not_this_ones_to_say() -> None:
    assert choose_batch(100_000, WHOLE, lambda n: None) == LEAST


@given(st.integers(1, 20_000), st.floats(0, 2), st.integers(1, 2000), st.integers(0, 2000))
def test_it_is_never_more_than_there_is_room_for(most: int, taken_by: float, room: int, ram: int) -> None:
    n = chosen(most, taken_by, room=room, ram=ram)
    assert min(most, LEAST) <= n <= min(most, MOST)
    assert n <= LEAST or room - taken_by * n > 0


def test_rows_of_a_layer() -> None:
    roles, block_bytes = lay_out_block([Weight("up", "u", 0, (64, 96, 8)), Weight("down", "d", 0, (96, 64, 8))])
    layers = [Layer(0, 0, "exps", 8, 0, block_bytes, roles)]
    assert pass_bytes(layers, 2, 100) == 100 * 2 * 96 * 6
    assert pass_bytes([], 2, 100) == 0
