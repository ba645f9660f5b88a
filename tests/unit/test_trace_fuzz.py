"""Traces with right checksums and wrong content: each is refused with a sentence, or every tool gets through it."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from llama_expert_pack.pypack.command.heat import use_counts
from llama_expert_pack.pypack.errors import ExpertPackError
from llama_expert_pack.pypack.format.layout import Layer
from llama_expert_pack.pypack.policy import make_policy
from llama_expert_pack.pypack.replay.as_recorded import check_live
from llama_expert_pack.pypack.replay.engine import Acquires, replay
from llama_expert_pack.pypack.replay.policies import REPLAY_POLICIES
from llama_expert_pack.pypack.replay.rows import replay_all
from llama_expert_pack.pypack.replay.tables import ranking, table
from llama_expert_pack.pypack.trace.format import Kind, TraceEnd, encode_header
from llama_expert_pack.pypack.trace.trace import Trace, read_trace
from tests.trace_tools import encode_end, encode_record
from tests.unit.test_replay import random_trace

KINDS = [Kind.ACQUIRE] * 6 + [Kind.FETCH] * 3 + [Kind.READ_FAILED, Kind.SLOTS]
HUGE = [0xFFFF, 1 << 16, (1 << 31) - 1, (1 << 32) - 1]


def made_up(random: Random) -> bytes:
    """Few layers of few experts, which mostly get slots at first; then records of which each is wrong now and then."""

    def rarely() -> bool:
        return random.random() < 0.02

    layers = [
        Layer(i, i, "exps", random.randint(1, 6), 0, random.choice([4096, 8192, 1 << 63]), ())
        for i in range(random.randint(1, 3))
    ]
    n_slots = random.randint(1, min(layer.n_expert for layer in layers))
    parts = [] if random.random() < 0.2 else [encode_record(i, Kind.SLOTS, 0, n_slots, [0]) for i in range(len(layers))]
    n_acquires = n_ids = 0
    for _ in range(random.randint(0, 12)):
        kind, layer = random.choice(KINDS), random.choice(layers)
        most = n_slots if kind == Kind.FETCH else layer.n_expert
        ids = random.sample(range(layer.n_expert), random.randint(1, most))
        if kind in (Kind.SLOTS, Kind.READ_FAILED):
            ids = [0] if kind == Kind.SLOTS else ids[:1]
        number = {
            Kind.ACQUIRE: len(ids) + random.randint(0, 3),
            Kind.FETCH: random.randint(0, len(ids)),
            Kind.SLOTS: n_slots,
        }.get(kind, 0)
        if rarely():
            ids = random.choice([[], [*ids, 0x7FFF], [0xFFFF], ids * 2])
        number = random.choice(HUGE) if rarely() else number
        n_acquires, n_ids = n_acquires + (kind == Kind.ACQUIRE), n_ids + len(ids) * (kind == Kind.ACQUIRE)
        parts.append(
            encode_record(0xFFFF if rarely() else layer.index, kind, random.choice([0, 1, *HUGE]), number, ids)
        )
    records = b"".join(parts)
    policy = random.choice([*sorted(REPLAY_POLICIES), "", "unknown"])
    end = TraceEnd(n_acquires, 0, n_ids, 0, 0)
    return encode_header(layers, random.choice([1, 2, 0xFFFFFFFF]), policy) + records + encode_end(records, end)


def use(trace: Trace) -> None:
    """All that the tools do with a trace, but for the pictures."""
    use_counts(trace)
    attempts: list[Callable[[], object]] = [
        lambda: check_live(trace),
        lambda: table(replay_all(trace, "x", "given", ["lru", "arc"], ["50%", "1MiB"])),
    ]
    for attempt in attempts:
        try:
            attempt()
        except ExpertPackError as error:
            assert "\n" not in str(error)
    ranking(replay_all(trace, "x", "given", ["lru", "belady", "belady-bypass"], ["50%", "100%"]))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(8))
def test_no_trace_breaks_a_tool(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    path = tmp_path / "x.trace"
    n_used = 0
    for _ in range(150):
        path.write_bytes(made_up(random))
        try:
            trace = read_trace(path)
        except ExpertPackError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            continue
        use(trace)
        n_used += 1
    assert n_used > 30


CONTRADICTIONS = {
    "kept, but not there": [(Kind.ACQUIRE, 3, [0, 1, 2]), (Kind.FETCH, 1, [0, 1])],
    "fetched, but there": [(Kind.ACQUIRE, 3, [0, 1, 2]), (Kind.FETCH, 2, [0, 1]), (Kind.FETCH, 1, [0])],
    "failed, but never there": [(Kind.READ_FAILED, 0, [2]), (Kind.ACQUIRE, 3, [0, 1, 2]), (Kind.FETCH, 2, [0, 1])],
    "failed twice": [(Kind.READ_FAILED, 0, [0]), (Kind.READ_FAILED, 0, [0]), (Kind.ACQUIRE, 3, [0, 1, 2]), (Kind.FETCH, 2, [0, 1])],
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_records_that_no_cache_could_follow(name: str, tmp_path: Path) -> None:
    records = encode_record(0, Kind.SLOTS, 0, 2, [0])
    records += b"".join(encode_record(0, kind, 0, number, ids) for kind, number, ids in CONTRADICTIONS[name])
    path = tmp_path / "x.trace"
    layers = [Layer(0, 0, "exps", 4, 0, 4096, ())]
    path.write_bytes(encode_header(layers, 2, "lru") + records + encode_end(records, TraceEnd(1, 0, 3, 0, 0)))
    with pytest.raises(
        ExpertPackError, match=r"x.trace: in the replay other experts are in the cache than record \d says"
    ):
        check_live(read_trace(path))


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Address space for 256 MiB more than this process has."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_replay_without_memory_ends_in_a_sentence(little_memory: None) -> None:
    trace = random_trace(1)
    layers = tuple(Layer(i, i, "exps", 1 << 22, i << 22, 4096, ()) for i in range(3))
    trace = Trace(**{**vars(trace), "layers": layers})
    pools = trace.pools(1 << 30)
    with pytest.raises(ExpertPackError, match="made: there is not enough memory to replay 12582912 experts in 1 pools"):
        replay(Acquires(trace), pools, make_policy("lru"))
