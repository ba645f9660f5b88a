"""The replay: what is published, several hits at once against one by one, and the best possible against brute force."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_expert_pack.pypack.command.cli import cli
from llama_expert_pack.pypack.errors import TraceError
from llama_expert_pack.pypack.format.layout import Layer
from llama_expert_pack.pypack.policy import aged_frequency
from llama_expert_pack.pypack.policy.aged_frequency import half_life
from llama_expert_pack.pypack.replay.as_recorded import check_live, replay_as_recorded
from llama_expert_pack.pypack.replay.engine import Acquires, replay
from llama_expert_pack.pypack.replay.policies import REPLAY_POLICIES, WITH_BOUNDS
from llama_expert_pack.pypack.replay.rows import replay_all
from llama_expert_pack.pypack.replay.static_hot import StaticHot
from llama_expert_pack.pypack.replay.tables import ranking
from llama_expert_pack.pypack.trace.format import Kind
from llama_expert_pack.pypack.trace.trace import Trace, read_trace

ROOT = Path(__file__).parents[2]
STORED = ROOT / "bench" / "data" / "traces"
WITHOUT_COUNTERS = {"gpt-oss-120b.trace.xz", "gemma-4-26b.trace.xz"}  # others recorded those runs


def make_trace(sizes: list[tuple[int, int]], acquires: list[tuple[int, list[int]]], top_k: int = 2) -> Trace:
    """``sizes``: (experts, block bytes) of each layer; ``acquires``: (layer, experts)."""
    layers: list[Layer] = []
    for n_expert, block_bytes in sizes:
        first_key = sum(layer.n_expert for layer in layers)
        layers.append(Layer(len(layers), len(layers), "exps", n_expert, first_key, block_bytes, ()))
    counts = np.array([len(experts) for _, experts in acquires], np.int64)
    return Trace(
        path="made",
        policy="",
        top_k=top_k,
        layers=tuple(layers),
        kind=np.full(len(acquires), Kind.ACQUIRE, np.uint8),
        layer=np.array([layer for layer, _ in acquires], np.int32),
        step=np.zeros(len(acquires), np.int64),
        number=counts.copy(),
        start=np.concatenate((np.zeros(1, np.int64), np.cumsum(counts))),
        ids=np.array([expert for _, experts in acquires for expert in experts], np.int32),
    )


def random_trace(seed: int, n: int = 400, largest: int = 12) -> Trace:
    """Three layers in two pools, favourites that change half-way, single tokens and batches, some larger than a pool."""
    random = np.random.default_rng(seed)
    sizes = [(12, 4096), (7, 8192), (12, 4096)]
    acquires = []
    for i in range(n):
        layer = i % 3
        n_expert = sizes[layer][0]
        weight = np.arange(1, n_expert + 1, dtype=float)[:: 1 if i < n // 2 else -1] ** -random.choice([0.5, 1.5])
        n_used = int(random.integers(1, min(n_expert, largest) + 1)) if random.random() < 0.1 else 2
        acquires.append((layer, random.choice(n_expert, n_used, replace=False, p=weight / weight.sum()).tolist()))
    return make_trace(sizes, acquires)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), share=st.floats(0.6, 1.1))
def test_several_hits_at_once_count_as_one_by_one(seed: int, share: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticHot, "WARM_TOKENS", 20)
        patch.setattr(aged_frequency, "HALF_LIFE_TOKENS", 10)
        trace = random_trace(seed, largest=4)  # a run records the passes of those larger than a pool
        pools = trace.pools(int(trace.payload_bytes * share) + 4 * 8192)
        for name, policy in REPLAY_POLICIES.items():
            counts = replay(Acquires(trace), pools, policy())
            recorded = replay_as_recorded(trace, policy(), pools)
            assert replace(counts, decode_hits=0, decode_misses=0) == recorded, name


def test_the_policies_differ() -> None:
    trace = random_trace(1, 3000)
    pools = trace.pools(trace.payload_bytes // 2)
    hits = {name: replay(Acquires(trace), pools, policy()).hits for name, policy in WITH_BOUNDS.items()}
    assert len(set(hits.values())) == len(hits)
    assert sorted(hits, key=lambda name: hits[name])[-2:] == ["belady", "belady-bypass"]


def test_more_experts_than_slots_come_in_passes() -> None:
    """Beside the one that is there, then in twos; the last pass takes the slot that was published first."""
    trace = make_trace([(5, 4096)], [(0, experts) for experts in ([0], [0, 1, 2, 3, 4], [2], [3])])
    counts = replay(Acquires(trace), trace.pools(2 * 4096), REPLAY_POLICIES["lru"]())
    assert (counts.hits, counts.misses, counts.evictions) == (2, 6, 4)
    assert (counts.decode_hits, counts.decode_misses) == (1, 2)


def test_a_read_may_fail_before_its_fetch_is_recorded() -> None:
    """More experts than slots, so that fetches are recorded; the slot of the failed read is free afterwards."""
    kinds = [Kind.ACQUIRE, Kind.FETCH, Kind.READ_FAILED, Kind.ACQUIRE, Kind.ACQUIRE, Kind.ACQUIRE]
    experts = [[0, 1, 2], [0, 1], [0], [2], [3], [1]]
    found = []
    for order in ([0, 1, 2, 3, 4, 5], [0, 2, 1, 3, 4, 5]):
        trace = make_trace([(5, 4096)], [(0, experts[i]) for i in order])
        trace = replace(trace, kind=np.array([kinds[i] for i in order], np.uint8))
        found.append(replay_as_recorded(trace, REPLAY_POLICIES["lru"](), trace.pools(2 * 4096)))
    assert found[0] == found[1]
    assert (found[0].hits, found[0].misses, found[0].evictions) == (0, 6, 2)


@pytest.mark.parametrize("policy", ["lru", "s3-fifo", "adaptive"])
def test_what_is_read_ahead_counts_as_missing(policy: str) -> None:
    """Two layers of one pool of five slots: what is read ahead spares what is computed with, and has slots in recorded order."""
    kinds = [Kind.ACQUIRE, Kind.AHEAD, Kind.ACQUIRE, Kind.ACQUIRE]
    events = [(0, [0, 1]), (1, [3, 1, 2]), (1, [1, 2, 4]), (0, [0, 1])]
    trace = make_trace([(5, 4096), (5, 4096)], events)
    trace = replace(trace, kind=np.array(kinds, np.uint8), number=np.array([2, 0, 3, 2]))
    counts = replay_as_recorded(trace, REPLAY_POLICIES[policy](), trace.pools(5 * 4096))
    assert counts.acquires == 3
    assert counts.misses >= 2 + 3 and counts.hits + counts.misses == 7
    assert counts.evictions >= 1, "the fifth of layer 1 needs a slot of somebody's"
    twice = replace(trace, kind=np.array([Kind.ACQUIRE, Kind.AHEAD, Kind.AHEAD, Kind.ACQUIRE], np.uint8))
    with pytest.raises(TraceError, match="other experts are in the cache than record 2 says"):
        replay_as_recorded(twice, REPLAY_POLICIES[policy](), trace.pools(5 * 4096))


@pytest.mark.parametrize("path", sorted(STORED.iterdir()), ids=lambda path: path.name)
def test_stored_traces_give_the_counters_of_their_runs(path: Path) -> None:
    counters = "no live counters" if path.name in WITHOUT_COUNTERS else "gives the run's counters"
    assert counters in check_live(read_trace(path))


def test_aging_counts_in_tokens() -> None:
    trace = random_trace(1)
    assert [half_life(pool) for pool in trace.pools(trace.payload_bytes)] == [512, 256]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True), min_size=1, max_size=8),
    st.integers(2, 4),
)
def test_nothing_beats_belady(acquires: list[list[int]], n_slots: int) -> None:
    trace = make_trace([(5, 4096)], [(0, experts) for experts in acquires])
    pools = trace.pools(n_slots * 4096)
    forced = replay(Acquires(trace), pools, WITH_BOUNDS["belady"]())
    free = replay(Acquires(trace), pools, WITH_BOUNDS["belady-bypass"]())
    assert forced.hits == brute_force(acquires, n_slots, bypass=False)
    assert free.hits == brute_force(acquires, n_slots, bypass=True)


def brute_force(acquires: list[list[int]], n_slots: int, *, bypass: bool) -> int:
    """The most hits of any choice of what to keep: every subset after every acquire."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for experts in acquires:
        wanted = frozenset(experts)
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            everything = held | wanted
            must = frozenset() if bypass else wanted
            others = sorted(everything - must)
            room = n_slots - len(must)
            for n in range(min(room, len(others)) + 1):
                for kept in combinations(others, n):
                    state = must | frozenset(kept)
                    after[state] = max(after.get(state, 0), hits + len(held & wanted))
        best = after
    return max(best.values())


def test_the_published_table_is_what_a_replay_counts() -> None:
    """Every policy on k3 at a small size, against docs/POLICY.md."""
    published = (ROOT / "docs" / "POLICY.md").read_text().split("\n### k3\n")[1].split("\n### ")[0]
    lines = [line.strip("| ").split(" | ") for line in published.splitlines() if line.startswith("| ")]
    column = lines[0].index("4%")
    printed = {line[0]: line[column].strip("*") for line in lines[2:]}
    rows = replay_all(read_trace(STORED / "k3.trace.xz"), "k3", "", sorted(WITH_BOUNDS), ["4%"])
    assert {row["policy"]: f"{row['hit_rate']:.3f}" for row in rows} == printed


def run_replay(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["replay", *map(str, arguments)])


def test_what_the_replay_writes_and_prints(tmp_path: Path) -> None:
    """Names of traces are shown as text; a trace in the folder is never written over."""
    trace = tmp_path / "\x1b[2J.trace.xz"
    trace.write_bytes((STORED / "k3.trace.xz").read_bytes())
    arguments = [trace, "--policy", "lru", "--budgets", "25%", "--out", tmp_path / "out"]
    for _ in range(2):  # over its own results
        done = run_replay(*arguments)
        assert done.exit_code == 0, done.output
        assert "### \\x1b[2J\n" in done.output and "\x1b" not in done.output
    for name in ("results.jsonl", "\x1b[2J.svg"):
        path = tmp_path / "out" / name
        before = path.read_bytes()
        path.write_bytes(b"LXPTRACE")
        done = run_replay(*arguments)
        assert done.exit_code == 1 and "it holds something else than" in done.stderr
        assert path.read_bytes() == b"LXPTRACE"
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no.trace"], "error: no.trace: "),
        ([STORED / "k3.trace.xz", "--policy", "fifo"], "error: there is no cache policy 'fifo': choose one of adaptive, aged-lfu,"),
        ([STORED / "k3.trace.xz", "--budgets", "much"], "error: the budget must be a size, such as"),
        ([STORED / "k3.trace.xz", "--out", "/dev/null/x"], "error: /dev/null/x: "),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, list) else "",
)  # fmt: skip
def test_errors_are_one_sentence(arguments: list[object], sentence: str) -> None:
    done = run_replay(*arguments)
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith(sentence) and done.stderr.count("\n") == 1


def test_the_charts_say_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run_replay(STORED / "k3.trace.xz", "--policy", "lru", "--budgets", "25%", "--out", tmp_path)
    assert done.stderr == "error: matplotlib draws the charts and is not installed: pip install matplotlib\n"


def test_what_is_named_alike_is_told_apart_and_given_twice_counts_once(tmp_path: Path) -> None:
    """A router's models write run.large.trace and run.small.trace; folders may hold the same name."""
    traces = [tmp_path / name for name in ("run.large.trace.xz", "run.small.trace.xz", "a/run.small.trace.xz")]
    (tmp_path / "a").mkdir()
    for trace in traces:
        trace.write_bytes((STORED / "k3.trace.xz").read_bytes())
    done = run_replay(*traces, "--policy", "lru", "--policy", "lru", "--budgets", "25%,25%", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    names = ["run.large", "run.small (2)", "run.small (3)"]
    assert [line[4:] for line in done.output.splitlines() if line.startswith("### ")] == [*names, "All"]
    assert {path.name for path in (tmp_path / "out").glob("*.svg")} == {f"{name}.svg" for name in names}
    assert "| cache | 25% |" in done.output and "| belady-bypass | 1.000 | 1.000 |" in done.output


def test_a_trace_without_acquires(tmp_path: Path) -> None:
    trace = make_trace([(4, 4096)], [])
    rows = replay_all(trace, "none", "given", ["lru", "belady-bypass"], ["50%"])
    assert [row["acquires"] for row in rows] == [0, 0]
    assert "| lru | 0.000 |" in ranking(rows)


def test_a_new_session_starts_with_an_empty_cache() -> None:
    """The second time, everything is missing again, and slots are as many as were given then."""
    slots, acquire = Kind.SLOTS, Kind.ACQUIRE
    events = [
        (slots, 2, 0),
        (acquire, 1, 1),
        (acquire, 1, 1),
        (slots, 1, 0),
        (acquire, 1, 1),
        (acquire, 1, 2),
        (acquire, 1, 1),
    ]
    trace = replace(
        make_trace([(4, 4096)], [(0, [id]) for _, _, id in events], top_k=1),
        kind=np.array([kind for kind, _, _ in events], np.uint8),
        number=np.array([number for _, number, _ in events], np.int64),
    )
    for policy in REPLAY_POLICIES.values():
        counts = replay_as_recorded(trace, policy())
        assert (counts.acquires, counts.hits, counts.misses, counts.evictions) == (5, 1, 4, 2)
