from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llama_expert_pack.pypack.errors import BudgetError
from llama_expert_pack.pypack.format.layout import Layer
from llama_expert_pack.pypack.placement.budget import plan_pools
from llama_expert_pack.pypack.placement.cache import ExpertCache
from llama_expert_pack.pypack.policy import DEFAULT_POLICY, make_policy
from llama_expert_pack.pypack.policy.lru import Lru
from llama_expert_pack.pypack.stats.counters import Counter, Counters
from tests.books import wrong_books
from tests.unit.fake_pack import make_layers


def acquire(cache: ExpertCache, counters: Counters, layer: Layer, experts: list[int]) -> list[int]:
    """What native does before a fetch: count, and find what is missing."""
    counters.array[Counter.ACQUIRES] += 1
    keys = [layer.first_key + expert for expert in experts]
    cache.freq[keys] += 1
    cache.last_use[keys] = counters.array[Counter.ACQUIRES]
    return [expert for expert, key in zip(experts, keys, strict=True) if cache.slot_of[key] < 0]


def publish(cache: ExpertCache, slot: int) -> None:
    cache.slot_of[cache.owner[slot]] = slot


def small_cache(n_slots: int = 4, n_expert: int = 8) -> tuple[ExpertCache, Counters, Layer]:
    layers, counters = make_layers([(n_expert, 4096)]), Counters()
    cache = ExpertCache(layers, Lru(), counters)
    cache.add_arena(plan_pools(layers, n_slots * 4096, 1))
    return cache, counters, layers[0]


class CacheMachine(RuleBasedStateMachine):
    """The cache against a model of plain dictionaries: two pools in one arena, a third in a second arena."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_layers([(8, 4096), (6, 8192), (5, 4096), (7, 4096)])
        self.counters = Counters()
        self.cache = ExpertCache(self.layers, make_policy(DEFAULT_POLICY), self.counters)
        on_cpu = [self.layers[0], self.layers[1], self.layers[2]]
        self.n_slots = {0: 5, 1: 3, 2: 5, 3: 4}
        plan = plan_pools(on_cpu, 5 * 4096 + 3 * 8192, 3)
        assert [pool.n_slots for pool in plan.pools] == [5, 3]
        assert self.cache.add_arena(plan) == 0
        assert self.cache.add_arena(plan_pools([self.layers[3]], 4 * 4096, 3, "GPU")) == 8
        self.pool_slots = {0: range(5), 1: range(5, 8), 2: range(5), 3: range(8, 12)}
        self.loading: dict[int, int] = {}  # slot -> key
        self.resident: dict[int, int] = {}
        self.n_evicted = 0

    @rule(data=st.data(), layer=st.integers(0, 3))
    def fetch(self, data: st.DataObject, layer: int) -> None:
        described = self.layers[layer]
        experts = data.draw(
            st.lists(st.integers(0, described.n_expert - 1), min_size=1, max_size=self.n_slots[layer], unique=True)
        )
        missing = acquire(self.cache, self.counters, described, experts)
        # of an earlier fetch, not ended yet: native has them in flight, and asks for no second read
        missing = [e for e in missing if described.first_key + e not in self.loading.values()]
        slots_before = dict(self.resident) | self.loading
        pool = self.pool_slots[layer]
        kept = {described.first_key + expert for expert in experts}
        n_free = sum(slot not in slots_before for slot in pool)
        n_evictable = sum(slot in pool and key not in kept for slot, key in self.resident.items())
        published = self.cache.next_slots[self.cache.layer_pool[layer]].tolist()
        can_go = [s for s in published if s >= 0 and s not in self.loading and self.resident.get(s) not in kept]
        tables = [t.copy() for t in (self.cache.slot_of, self.cache.reserved_slot, self.cache.owner)]

        if len(missing) > n_free + n_evictable:
            with pytest.raises(BudgetError):
                self.cache.choose_slots(layer, missing, experts)
            after = (self.cache.slot_of, self.cache.reserved_slot, self.cache.owner)
            assert all((a == b).all() for a, b in zip(tables, after, strict=True)), "all or nothing"
            return

        slots = self.cache.choose_slots(layer, missing, experts)
        assert len(set(slots)) == len(slots) == len(missing)
        victims = [slot for slot in slots if slot in self.resident]
        if len(can_go) >= len(missing):
            assert slots == can_go[: len(missing)], "the published ones, in order"
        else:
            assert len(victims) == max(0, len(missing) - n_free), "free slots go first"
        self.n_evicted += len(victims)
        self.book(layer, missing, slots, kept)

    def book(self, layer: int, missing: list[int], slots: list[int], kept: set[int]) -> None:
        for slot, expert in zip(slots, missing, strict=True):
            assert slot in self.pool_slots[layer] and slot not in self.loading
            assert self.resident.pop(slot, None) not in kept
            self.loading[slot] = self.layers[layer].first_key + expert
        self.cache.prepare(layer, missing)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), is_ok=st.booleans())
    def end_read(self, data: st.DataObject, is_ok: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.loading)))
        key = self.loading.pop(slot)
        if is_ok:
            publish(self.cache, slot)
            self.resident[slot] = key
        else:
            self.cache.rollback(slot)

    @rule(slot=st.integers(-1, 12))
    def end_of_no_read(self, slot: int) -> None:
        if slot not in self.loading:
            with pytest.raises(ValueError, match="not being loaded"):
                self.cache.rollback(slot)

    @precondition(lambda self: self.loading or self.resident)
    @rule(data=st.data())
    def fetch_what_has_a_slot(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted([*self.loading.values(), *self.resident.values()])))
        layer = max(i for i, layer in enumerate(self.layers) if layer.first_key <= key)
        with pytest.raises(ValueError, match="have a slot already"):
            self.cache.choose_slots(layer, [key - self.layers[layer].first_key], [])

    @invariant()
    def tables_agree_with_the_model(self) -> None:
        assert wrong_books(self.cache) == []
        assert {int(s): int(k) for k, s in enumerate(self.cache.slot_of) if s >= 0} == self.resident
        assert {
            int(s): int(k) for k, s in enumerate(self.cache.reserved_slot) if s >= 0
        } == self.resident | self.loading
        assert {s: int(k) for s, k in enumerate(self.cache.owner.tolist()) if k >= 0} == self.resident | self.loading
        assert self.counters.snapshot().evictions == self.n_evicted


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_shared_tables_have_the_shapes_of_the_header() -> None:
    layers = make_layers([(8, 4096), (6, 8192), (5, 4096)])
    cache = ExpertCache(layers, Lru(), Counters())
    for table, dtype, n in (
        (cache.slot_of, np.int32, 19),
        (cache.freq, np.int64, 19),
        (cache.last_use, np.int64, 19),
        (cache.layer_slots, np.int32, 3),
        (cache.reserved_slot, np.int32, 19),
        (cache.owner, np.int64, 19),
        (cache.layer_pool, np.int32, 3),
    ):
        assert table.dtype == dtype and table.shape == (n,) and table.flags.c_contiguous
    shared = ("slot_of", "freq", "last_use", "reserved_slot", "owner", "layer_slots", "layer_pool", "next_slots")
    before = [getattr(cache, name).__array_interface__["data"][0] for name in shared]
    cache.add_arena(plan_pools(layers, 5 * 4096 + 3 * 8192, 3))
    after = [getattr(cache, name).__array_interface__["data"][0] for name in shared]
    assert before == after, "native keeps pointers to them"
    assert cache.layer_pool.tolist() == [0, 1, 0]
    assert cache.layer_slots.tolist() == [5, 3, 5]
    assert (cache.slot_of == -1).all()


def test_withdrawn_slots_are_gone() -> None:
    cache, counters, layer = small_cache(n_slots=4)
    for experts in ([0], [1]):
        for slot in cache.choose_slots(0, acquire(cache, counters, layer, experts), experts):
            publish(cache, slot)
        cache.prepare(0, experts)
    cache.withdraw([2, 3])
    assert cache.layer_slots.tolist() == [2] and cache.next_slots[0].tolist()[:3] == [0, 1, -1]
    assert cache.choose_slots(0, acquire(cache, counters, layer, [2]), [2]) == [0]
    cache.withdraw([2, 3])
    assert cache.layer_slots.tolist() == [2]
    with pytest.raises(BudgetError, match="2 more slots are needed, but only 1 of 2"):
        cache.choose_slots(0, [3, 4], [3, 4])


def test_the_policy_chooses_and_active_experts_stay() -> None:
    cache, counters, layer = small_cache()
    for experts in ([0], [1], [2], [3]):
        for slot in cache.choose_slots(0, acquire(cache, counters, layer, experts), experts):
            publish(cache, slot)
        cache.prepare(0, experts)
    assert acquire(cache, counters, layer, [0, 4]) == [4]
    slot_of_1 = int(cache.slot_of[1])
    assert cache.choose_slots(0, [4], [0, 4]) == [slot_of_1]
    assert cache.slot_of[1] == -1
    acquire(cache, counters, layer, [2, 3, 5])
    slot_of_0 = int(cache.slot_of[0])
    assert cache.choose_slots(0, [5], [2, 3, 5]) == [slot_of_0]
    assert cache.slot_of[0] == -1, "not 2 or 3, which are older but active; not 4, which is loading"
    assert counters.snapshot().evictions == 2


def test_a_slot_is_not_given_away_before_its_publication() -> None:
    cache, counters, layer = small_cache(n_slots=1)
    (slot,) = cache.choose_slots(0, acquire(cache, counters, layer, [0]), [0])
    with pytest.raises(BudgetError):
        cache.choose_slots(0, [1], [1])
    cache.slot_of[0] = slot
    assert cache.choose_slots(0, [1], [1]) == [slot]


@pytest.mark.parametrize(
    ("missing", "active"), [([1, 1], [1]), ([8], [8]), ([-1], []), ([0], [0, 8]), ([0], [-1])], ids=repr
)
def test_wrong_experts_are_refused_and_change_nothing(missing: list[int], active: list[int]) -> None:
    cache, _, _ = small_cache()
    with pytest.raises(ValueError, match="layer 0"):
        cache.choose_slots(0, missing, active)
    assert (cache.reserved_slot == -1).all() and wrong_books(cache) == []


def test_arrays_are_as_good_as_lists_and_nothing_is_nothing() -> None:
    cache, _, _ = small_cache()
    wanted = np.array([3, 5], np.int32)
    assert len(cache.choose_slots(0, wanted, wanted)) == 2  # type: ignore[arg-type]
    assert cache.choose_slots(0, [], []) == []


def test_a_layer_without_slots_and_a_layer_with_two_pools_are_refused() -> None:
    layers = make_layers([(4, 4096), (4, 4096)])
    cache = ExpertCache(layers, Lru(), Counters())
    plan = plan_pools(layers[:1], 1 << 20, 1)
    cache.add_arena(plan)
    with pytest.raises(ValueError, match="arena was not added"):
        cache.choose_slots(1, [0], [0])
    with pytest.raises(ValueError, match="does not belong"):
        cache.add_arena(plan)
    with pytest.raises(ValueError, match="does not belong"):
        cache.add_arena(plan_pools([Layer(1, 1, "exps", 4, 4, 8192, ())], 1 << 20, 1))
    assert cache.n_slots == 4


def test_the_next_slots_are_free_ones_then_the_policys_victims_in_its_order() -> None:
    cache, counters, layer = small_cache(n_slots=5)
    assert cache.next_slots[0, :6].tolist() == [0, 1, 2, 3, 4, -1]
    for expert in (0, 1, 2):
        (slot,) = cache.choose_slots(0, acquire(cache, counters, layer, [expert]), [expert])
        publish(cache, slot)
        cache.prepare(0, [expert])
    acquire(cache, counters, layer, [0])
    cache.prepare(0, [2])
    assert cache.next_slots[0, :6].tolist() == [3, 4, 1, 2, 0, -1], "free, then by last use: 1, 2, 0"
    assert cache.choose_slots(0, [5, 6, 7], [5, 6, 7, 1]) == [3, 4, 2], "1 is in use"
    with pytest.raises(BudgetError, match="2 more slots are needed, but only 1 of 5 can be given up"):
        cache.choose_slots(0, [3, 4], [3, 4, 1])
    assert cache.choose_slots(0, [3], [3, 1]) == [0]
    assert wrong_books(cache) == []


def test_the_next_slots_do_not_depend_on_whether_a_read_has_failed_yet() -> None:
    """Reads fail in other threads, before the next slots are chosen or after: a replay doesn't know which."""
    chosen = []
    for is_early in (True, False):
        cache, counters, layer = small_cache(n_slots=4)
        for expert in (0, 1, 2, 3):
            (slot,) = cache.choose_slots(0, acquire(cache, counters, layer, [expert]), [expert])
            publish(cache, slot)
            cache.prepare(0, [expert])
        slots = cache.choose_slots(0, acquire(cache, counters, layer, [4, 5]), [4, 5])
        publish(cache, slots[1])
        if is_early:
            cache.rollback(slots[0])
        cache.prepare(0, [4, 5])
        if not is_early:
            cache.rollback(slots[0])
        assert cache.owner[slots[0]] == -1 and wrong_books(cache) == []
        chosen.append(cache.next_slots[0].tolist())
    assert chosen[0] == chosen[1]


def test_a_policy_that_does_not_rank_is_always_asked() -> None:
    layers = make_layers([(8, 4096)])
    cache = ExpertCache(layers, make_policy("s3-fifo"), Counters())
    cache.add_arena(plan_pools(layers, 4 * 4096, 1))
    cache.prepare(0, [])
    assert (cache.next_slots == -1).all()


def break_owner(cache: ExpertCache) -> None:
    cache.owner[0] = 5


def break_publication(cache: ExpertCache) -> None:
    cache.slot_of[0] = 2


def break_place(cache: ExpertCache) -> None:
    cache.reserved_slot[1] = -1


def one_owner_twice(cache: ExpertCache) -> None:
    cache.owner[3] = cache.owner[0]


@pytest.mark.parametrize("damage", [break_owner, break_publication, break_place, one_owner_twice])
def test_check_finds_damage(damage: Callable[[ExpertCache], None]) -> None:
    cache, _, _ = small_cache()
    for slot in cache.choose_slots(0, [0], [0]):
        publish(cache, slot)
    cache.prepare(0, [0])
    cache.choose_slots(0, [1], [1])
    assert wrong_books(cache) == []
    damage(cache)
    assert wrong_books(cache) != []


def test_reads_that_end_in_other_threads() -> None:
    cache, counters, layer = small_cache(n_slots=12, n_expert=40)
    rng = np.random.default_rng(1)

    def end(slots: list[int], fails: bool) -> None:
        for slot in slots:
            cache.rollback(slot) if fails else publish(cache, slot)

    threads: list[threading.Thread] = []
    for step in range(400):
        if len(threads) == 3:  # at most 3 x 3 slots are loading, so 3 more always fit
            threads.pop(0).join()
        in_flight = set(np.flatnonzero(cache.reserved_slot != cache.slot_of).tolist())
        experts = [int(e) for e in rng.choice(40, 3, replace=False) if int(e) not in in_flight]
        missing = [e for e in acquire(cache, counters, layer, experts) if cache.reserved_slot[e] < 0]
        slots = cache.choose_slots(0, missing, missing)
        cache.prepare(0, missing)
        thread = threading.Thread(target=end, args=(slots, step % 5 == 0))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    assert wrong_books(cache) == []
    assert (cache.reserved_slot == cache.slot_of).all()
