from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_expert_pack.pypack.errors import BudgetError, UsageError
from llama_expert_pack.pypack.placement.budget import cache_budget, cache_room, cpu_budget, host_budget, plan_pools
from llama_expert_pack.pypack.placement.tiers import N_SPARE
from llama_expert_pack.pypack.values.sizes import parse_size
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
WRONG += [0.25, -1, 1 << 63, float("nan"), float("inf"), True, None, "99999999999999999999TiB", [], -(10**400)]
WRONG += ["7" * 5000, "0" * 5000 + "." + "7" * 5000 + "%%", "7" * 5000 + ".5GiB", "7" * 5000 + "%", 10**5000]


@pytest.mark.parametrize("size", WRONG, ids=range(len(WRONG)))
def test_wrong_sizes(size: Any) -> None:
    with pytest.raises(UsageError, match=r"^expert_cache ") as caught:
        parse_size(size, 1000, "expert_cache")
    assert len(str(caught.value)) < 200


def test_leading_zeros_are_a_number() -> None:
    assert parse_size("0" * 5000 + "7", 0) == 7


def test_auto_takes_all_experts_or_half_of_what_is_free() -> None:
    layers = make_layers([(10, MIB)])
    assert cache_budget("auto", layers, free_bytes=25 * MIB, reserve_bytes=5 * MIB) == 10 * MIB
    assert cache_budget("auto", layers, free_bytes=24 * MIB, reserve_bytes=5 * MIB) == 19 * MIB // 2
    assert cache_budget("auto", layers, free_bytes=MIB, reserve_bytes=5 * MIB) == 0
    assert cache_budget("auto", layers, free_bytes=14 * MIB, reserve_bytes=5 * MIB, device="CUDA0") == 9 * MIB
    assert cache_budget("50%", layers, free_bytes=25 * MIB, reserve_bytes=5 * MIB) == 10 * MIB
    assert cache_budget("3MiB", layers, free_bytes=25 * MIB, reserve_bytes=0) == 3 * MIB


def test_fitting_leaves_a_size_or_half_of_what_is_free_but_no_more_than_experts_take() -> None:
    assert [cache_room(size, 10 * MIB, 12 * MIB) for size in ("auto", " AUTO ", "90%", "3MiB", "1TiB", 5)] == [
        6 * MIB, 6 * MIB, 6 * MIB, 3 * MIB, 10 * MIB, 5
    ]  # fmt: skip
    assert cache_room("90%", 10 * MIB, 100 * MIB) == 10 * MIB


def too_small(budget: int, free: int | None, reserve: int = 0) -> str:
    with pytest.raises(BudgetError) as caught:
        plan_pools(make_layers([(64, 3 * MIB), (4, 5 * MIB)]), budget, 6, "CPU", free_bytes=free, reserve_bytes=reserve)
    return str(caught.value)


def test_too_small_names_everything() -> None:
    layers = make_layers([(64, 3 * MIB), (4, 5 * MIB)])
    least = 6 * 3 * MIB + 4 * 5 * MIB
    assert too_small(100 * MIB, 40 * MIB, MIB * 5 // 2) == (
        "the expert cache on CPU is too small: expert_cache comes to 100 MiB, 40 MiB are free and expert_cache_reserve "
        f"keeps 2621440 bytes (2.5 MiB) of that, but one working set of top-6 experts needs at least {least} bytes: "
        "lower expert_cache_reserve"
    )
    plan = plan_pools(layers, least, 6)
    assert [pool.n_slots for pool in plan.pools] == [6, 4]
    with pytest.raises(BudgetError):
        plan_pools(layers, least - 1, 6)


@pytest.mark.parametrize(
    ("budget", "free", "reserve", "says"),
    [
        (0, 300 * MIB, GIB, "comes to 0 bytes, 300 MiB are free and expert_cache_reserve keeps 1 GiB of that"),
        (1024, 300 * MIB, 0, "comes to 1 KiB, 300 MiB are free"),
        (1025, 300 * MIB, 0, "comes to 1025 bytes (1.0 KiB)"),
        (300 * MIB, 300 * MIB + 1, 300 * MIB, "314572801 bytes (300.0 MiB) are free"),
    ],
)
def test_sizes_are_said_exactly(budget: int, free: int, reserve: int, says: str) -> None:
    assert says in too_small(budget, free, reserve)


@pytest.mark.parametrize(
    ("budget", "free", "reserve", "advice"),
    [
        (0, 300 * MIB, GIB, ": lower expert_cache_reserve"),
        (1024, 300 * MIB, 0, ": raise expert_cache"),
        (1024, 300 * MIB, 300 * MIB, ": lower expert_cache_reserve and raise expert_cache"),
        (100 * MIB, 20 * MIB, 0, ": make more memory free"),
        (0, GIB, 0, ": raise expert_cache"),
        (1024, None, 0, ": raise the budget"),
    ],
)
def test_too_small_says_what_to_do(budget: int, free: int | None, reserve: int, advice: str) -> None:
    assert too_small(budget, free, reserve).endswith(advice)


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

    slots, offsets = plan.arena_slots()
    assert offsets.dtype == np.uint64 and slots.tolist() == list(range(plan.n_slots))
    ends = [
        int(offset) + pool.block_bytes for pool in plan.pools for offset in offsets[pool.first_slot :][: pool.n_slots]
    ]
    assert [*map(int, offsets), plan.arena_bytes] == [0, *ends], "slots lie one after the other"
    assert not (offsets % np.uint64(4096)).any()


@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([4096, 8192, 12288])), min_size=1, max_size=5),
    top_k=st.integers(1, 8),
    fraction=st.floats(0, 1.2),
    host_fraction=st.floats(0, 1.2),
)
def test_plans_with_host_memory(
    shapes: list[tuple[int, int]], top_k: int, fraction: float, host_fraction: float
) -> None:
    """The device gets what it gets without; of its blocks some hold no slot, but never those of a working set."""
    layers = make_layers(shapes)
    whole = sum(layer.n_expert * layer.block_bytes for layer in layers)
    host_bytes = int(host_fraction * whole)
    try:
        alone = plan_pools(layers, int(fraction * whole), top_k)
    except BudgetError:
        return
    plan = plan_pools(layers, int(fraction * whole), top_k, host_bytes=host_bytes)
    assert plan.arena_bytes == alone.arena_bytes and plan.host_bytes <= host_bytes
    slots, offsets = plan.arena_slots()
    starts = {int(offset) for offset in offsets}
    for pool, before in zip(plan.pools, alone.pools, strict=True):
        n_least = max(min(top_k, layers[i].n_expert) for i in pool.layers)
        n_beside = pool.n_spare + pool.n_transit
        assert pool.n_device + n_beside == before.n_slots and n_least <= pool.n_device
        assert before.n_slots <= pool.n_slots <= pool.n_experts
        assert pool.n_spare <= N_SPARE and pool.n_transit <= n_least
        assert (pool.n_host > n_beside) if pool.n_host else n_beside == 0
        assert pool.n_transit == 0 or pool.n_slots < pool.n_experts, "nothing is read any more once all are there"
        spares, transits = plan.beside_slots(pool)
        assert (len(spares), len(transits)) == (pool.n_spare, pool.n_transit)
        assert not starts & {*spares.tolist(), *transits.tolist()}
        starts |= {*spares.tolist(), *transits.tolist()}
        mine = slots[(slots >= pool.first_slot) & (slots < pool.first_slot + pool.n_slots)]
        assert mine.tolist() == list(range(pool.first_slot, pool.first_slot + pool.n_device)), "host slots are the last"
    n_beside = sum(pool.n_spare + pool.n_transit for pool in plan.pools)
    assert len(starts) == len(slots) + n_beside, "no two blocks are the same"
    if host_bytes >= whole:
        assert all(pool.n_slots == pool.n_experts for pool in plan.pools), "all fits"


def test_layers_on_the_cpu_get_a_working_set_of_expert_ram() -> None:
    layers = make_layers([(256, MIB), (256, MIB)])

    def of(cache: Any, ram: Any, share: int = 0, beside_gpu: bool = True) -> tuple[int, str]:
        return cpu_budget(cache, ram, layers[:1], share, 8, 4 * GIB, GIB, beside_gpu=beside_gpu)

    assert of("100MiB", 0) == of("100MiB", "0") == of("100MiB", "0%") == (100 * MIB, "expert_cache")
    assert of("100MiB", "64MiB", 32 * MIB) == (32 * MIB, "expert_ram")
    assert of("100MiB", "64MiB", 2 * MIB) == (8 * MIB, "expert_ram"), "a working set"
    assert of("100MiB", "6MiB", 3 * MIB) == (6 * MIB, "expert_ram"), "never more than was given"
    assert of("100MiB", "auto", 2 * MIB) == (8 * MIB, "expert_ram")
    assert of("100MiB", "auto", 2 * MIB, beside_gpu=False) == (100 * MIB, "expert_cache"), "alone it is one memory"
    assert of("100MiB", "64MiB", 32 * MIB, beside_gpu=False) == (32 * MIB, "expert_ram"), "as was said"
    with pytest.raises(BudgetError, match=r"expert_ram comes to 6 MiB.* raise expert_ram"):
        plan_pools(layers[:1], 6 * MIB, 8, free_bytes=GIB, option="expert_ram")


def test_host_memory_is_shared_by_the_layers_of_all_devices() -> None:
    layers = make_layers([(8, 4096), (24, 4096)])
    both = [host_budget("1MiB", [layer], layers, 8 * MIB, 0) for layer in layers]
    assert both == [MIB // 4, MIB * 3 // 4]
    assert host_budget("50%", layers, layers, 9 * MIB, MIB) == 4 * MIB
    assert host_budget("auto", layers, layers, 11 * MIB, MIB) == 9 * MIB, "a tenth is left to others"
    assert host_budget("64GiB", layers, layers, 11 * MIB, MIB) == 10 * MIB, "never more than there is"
    assert host_budget("auto", layers, layers, MIB, 2 * MIB) == 0 == host_budget(0, layers, layers, MIB, 0)
