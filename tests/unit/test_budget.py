from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypack.budget import cache_budget, parse_size, plan_pools
from pypack.errors import BudgetError, UsageError
from tests.unit.fake_pack import make_layers

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("size", "n_bytes"),
    [
        ("20GiB", 20 * GIB),
        ("20 gib", 20 * GIB),
        ("512MiB", 512 * MIB),
        ("1.5G", 3 * GIB // 2),
        (".5k", 512),
        ("20GB", 20 * 10**9),
        ("1TiB", 1 << 40),
        ("123", 123),
        ("9007199254740993", 9007199254740993),
        ("4096B", 4096),
        ("60%", 600),
        ("12.5 %", 125),
        ("0%", 0),
        (0, 0),
        (123, 123),
        (2e9, 2 * 10**9),
    ],
)
def test_sizes(size: str | int | float, n_bytes: int) -> None:
    assert parse_size(size, 1000) == n_bytes


WRONG: list[Any] = ["", "GiB", "lots", "-1", "1e9", "5XB", "1.2.3G", "101%", "٣GiB", "nan", "9EiB", "9e99"]
WRONG += [0.25, -1, 1 << 63, float("nan"), float("inf"), True, None, "99999999999999999999TiB"]


@pytest.mark.parametrize("size", WRONG)
def test_wrong_sizes(size: Any) -> None:
    with pytest.raises(UsageError):
        parse_size(size, 1000)


def test_auto_takes_all_experts_or_half_of_what_is_free() -> None:
    layers = make_layers([(10, MIB)])
    assert cache_budget("auto", layers, free_bytes=25 * MIB, reserve_bytes=5 * MIB) == 10 * MIB
    assert cache_budget("auto", layers, free_bytes=24 * MIB, reserve_bytes=5 * MIB) == 19 * MIB // 2
    assert cache_budget("auto", layers, free_bytes=MIB, reserve_bytes=5 * MIB) == 0
    assert cache_budget("50%", layers, free_bytes=25 * MIB, reserve_bytes=5 * MIB) == 10 * MIB
    assert cache_budget("3MiB", layers, free_bytes=25 * MIB, reserve_bytes=0) == 3 * MIB


def test_too_small_names_everything() -> None:
    layers = make_layers([(64, 3 * MIB), (4, 5 * MIB)])
    least = 6 * 3 * MIB + 4 * 5 * MIB
    with pytest.raises(BudgetError) as caught:
        plan_pools(layers, 100 * MIB, 6, "CPU", free_bytes=40 * MIB, reserve_bytes=MIB * 5 // 2)
    message = str(caught.value)
    for part in (
        "CPU",
        "100.0 MiB were requested",
        "40.0 MiB are free",
        "2.5 MiB are reserved",
        "38.0 MiB",
        str(least),
    ):
        assert part in message
    plan = plan_pools(layers, least, 6)
    assert [pool.n_slots for pool in plan.pools] == [6, 4]
    with pytest.raises(BudgetError):
        plan_pools(layers, least - 1, 6)


def test_free_memory_limits_the_budget() -> None:
    plan = plan_pools(make_layers([(64, MIB)]), 60 * MIB, 2, free_bytes=20 * MIB, reserve_bytes=4 * MIB)
    assert plan.n_slots == 16
    assert plan.arena_bytes == 16 * MIB


def test_layers_of_one_block_size_share_a_pool_and_pools_share_alike() -> None:
    layers = make_layers([(100, MIB), (50, 2 * MIB), (100, MIB)])
    plan = plan_pools(layers, 150 * MIB, 4)
    assert plan.pool_of_layer == {0: 0, 2: 0, 1: 1}
    assert [pool.n_slots for pool in plan.pools] == [100, 25]


def test_a_pool_gets_no_more_slots_than_experts() -> None:
    plan = plan_pools(make_layers([(4, MIB), (8, 4096)]), 1 << 60, 1000)
    assert [pool.n_slots for pool in plan.pools] == [4, 8]


shapes = st.lists(
    st.tuples(st.integers(1, 100), st.sampled_from([4096, 8192, 3 * 4096, 13_369_344])),
    min_size=1,
    max_size=6,
)


def slots_bytes(share: Fraction, n_experts: dict[int, int], n_least: dict[int, int]) -> int:
    return sum(size * max(n_least[size], int(share * n)) for size, n in n_experts.items())


@given(shapes=shapes, top_k=st.integers(1, 20), fraction=st.floats(0, 1.2))
def test_plans(shapes: list[tuple[int, int]], top_k: int, fraction: float) -> None:
    layers = make_layers(shapes)
    budget = int(fraction * sum(n * size for n, size in shapes))
    sizes = list(dict.fromkeys(size for _, size in shapes))
    n_experts = {size: sum(n for n, s in shapes if s == size) for size in sizes}
    n_least = {size: max(min(top_k, n) for n, s in shapes if s == size) for size in sizes}
    try:
        plan = plan_pools(layers, budget, top_k)
    except BudgetError:
        assert budget < sum(n_least[size] * size for size in sizes)
        return

    assert plan.arena_bytes <= budget
    assert [pool.block_bytes for pool in plan.pools] == sizes
    for pool in plan.pools:
        assert n_least[pool.block_bytes] <= pool.n_slots <= n_experts[pool.block_bytes]
        is_full = pool.n_slots == n_experts[pool.block_bytes]
        assert is_full or budget - plan.arena_bytes < pool.block_bytes, "bytes were left that a slot would fit in"
    shares = {Fraction(k, n) for n in n_experts.values() for k in range(n + 1)}
    common = max(share for share in shares if slots_bytes(share, n_experts, n_least) <= budget)
    for pool in plan.pools:  # the same share for all; single slots more for what is left
        assert pool.n_slots >= int(common * n_experts[pool.block_bytes])

    offsets = plan.offsets()
    assert offsets.dtype == np.uint64 and len(offsets) == plan.n_slots
    ends = [
        int(offset) + pool.block_bytes for pool in plan.pools for offset in offsets[pool.first_slot :][: pool.n_slots]
    ]
    assert [*map(int, offsets), plan.arena_bytes] == [0, *ends], "slots lie one after the other"
    assert not (offsets % np.uint64(4096)).any()
