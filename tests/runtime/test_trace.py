"""What a run records is what it did: the trace, replayed, gives the counters of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.replaying.cache import replay_as_recorded
from pypack.errors import DecodeError, TraceError, UsageError
from pypack.pack import find_pack, open_pack
from pypack.policy import POLICIES
from pypack.trace import read_trace
from pypack.trace_format import Kind
from tests.compare import minimum_budget
from tests.runtime.packed import FAULTS, evaluate, load, loaded, reads, run_python, variant

BATCHES = [20, *[1] * 12, 3, *[1] * 12, 40, *[1] * 20]  # prefill and decode, batches larger than the cache


def check(path: Path, live: tuple[int, ...]) -> None:
    trace = read_trace(path)
    assert trace.end is not None and trace.end[:4] == live
    trace.save(path.with_suffix(".again"))  # what native wrote is what Python writes
    assert path.with_suffix(".again").read_bytes() == path.read_bytes()
    counts = replay_as_recorded(trace, POLICIES[trace.policy]())
    assert (counts.acquires, counts.hits, counts.misses, counts.evictions) == live


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_replay_gives_the_live_counters(policy: str, tmp_path: Path) -> None:
    """Two groups in a layer with blocks of two sizes; 640 experts and top 6; three budgets."""
    for name, shares in {"two-groups": (0, 0.5), "many-experts": (0, 0.2), "mixed-between-layers": (0.6,)}.items():
        path = tmp_path / f"{name}.gguf"
        if not path.exists():
            variant(name, tmp_path)
        pack = open_pack(find_pack(path))
        for share in shares:
            cache = max(minimum_budget(pack), int(pack.payload_bytes * share))
            trace = tmp_path / f"{name}-{share}.trace"
            with loaded(path, expert_cache=cache, expert_policy=policy, expert_trace=trace) as llm:
                evaluate(llm, BATCHES)
                stats = llm.expert_stats()
            assert stats.evictions > 0 and (stats.hits > 0 or share == 0)
            check(trace, (stats.acquires, stats.hits, stats.misses, stats.evictions))


def test_failed_reads_are_replayed_too(tmp_path: Path) -> None:
    path = variant("two-groups", tmp_path)
    pack = open_pack(find_pack(path))
    trace = tmp_path / "failing.trace"
    with loaded(path, expert_cache=pack.payload_bytes // 2, expert_trace=trace) as llm:
        evaluate(llm, [3, 1, 1])
        llm.reset()
        for after in (0, 3):
            with reads(llm, FAULTS["EIO"], after=after), pytest.raises(DecodeError):
                llm.eval([9, 8, 7, 6, 5, 4, 3, 2, 1])
            llm.reset()
            evaluate(llm, [5, *[1] * 10])
            llm.reset()
        stats = llm.expert_stats()
    assert (read_trace(trace).kind == Kind.READ_FAILED).sum() > 0
    assert stats.failures == 2
    check(trace, (stats.acquires, stats.hits, stats.misses, stats.evictions))


def test_steps_and_rows(tmp_path: Path) -> None:
    path = variant("two-groups", tmp_path)
    with loaded(path, expert_cache="1GiB", expert_trace=tmp_path / "x.trace") as llm:
        evaluate(llm, [7, 1, 2])
    trace = read_trace(tmp_path / "x.trace").only_acquires()
    assert trace.top_k == 2 and trace.policy == "by-budget"
    assert trace.step.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert trace.number.tolist() == [14] * 4 + [2] * 4 + [4] * 4
    assert trace.layer.tolist() == [0, 1, 2, 3] * 3


def test_the_same_logits_with_and_without_a_trace(tmp_path: Path) -> None:
    path = variant("many-experts", tmp_path)
    bits = []
    for trace in (None, tmp_path / "x.trace"):
        with loaded(path, expert_cache="1MiB", expert_trace=trace) as llm:
            bits.append(evaluate(llm, [9, 1, 1]))
    assert (bits[0] == bits[1]).all()


def test_a_path_that_cannot_be_written_is_refused_at_load(tmp_path: Path) -> None:
    path = variant("two-groups", tmp_path)
    missing = tmp_path / "no" / "folder.trace"
    for _ in range(2):  # the refused load leaves nothing registered
        with pytest.raises(UsageError, match=r"folder.trace: the expert trace can't be written: No such file"):
            load(path, expert_trace=missing)
    with pytest.raises(UsageError, match="expert_trace would have no effect without expert_pack"):
        load(path, expert_pack=None, expert_trace=tmp_path / "x.trace")


def test_a_full_disk_at_load_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "full.trace"
    link.symlink_to("/dev/full")
    with pytest.raises(UsageError, match=r"full.trace: the expert trace can't be written: No space left"):
        load(variant("two-groups", tmp_path), expert_trace=link)


def test_a_write_that_fails_ends_the_trace_and_nothing_else(tmp_path: Path) -> None:
    code = """
import resource, sys
from tests.runtime.packed import evaluate, loaded
with loaded(sys.argv[1], expert_cache="1GiB", expert_trace=sys.argv[2]) as llm:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))  # the header fits, the records do not
    print(evaluate(llm, [5, 1, 1]).shape[0])
"""
    trace = tmp_path / "x.trace"
    run = run_python(code, variant("two-groups", tmp_path), trace)
    assert (run.returncode, run.stdout) == (0, "7\n"), run.stderr
    said = [line for line in run.stderr.splitlines() if "the expert trace is incomplete" in line]
    assert len(said) == 1 and "x.trace: " in said[0], run.stderr
    with pytest.raises(TraceError, match="has no end mark"):
        read_trace(trace)
