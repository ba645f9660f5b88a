"""What a run records is what it did: the trace, replayed, gives the counters of the run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lab.logits import minimum_budget
from llama_expert_pack.bridge.outputs import TraceFile, path_of_child
from llama_expert_pack.pypack.errors import DecodeError, TraceError, UsageError
from llama_expert_pack.pypack.format.pack import manifest_path, open_pack
from llama_expert_pack.pypack.policy import POLICIES
from llama_expert_pack.pypack.replay.as_recorded import replay_as_recorded
from llama_expert_pack.pypack.source.match import find_pack
from llama_expert_pack.pypack.trace.format import Kind
from llama_expert_pack.pypack.trace.trace import read_trace
from tests.runtime.packed import FAULTS, evaluate, load, loaded, reads, run_python, variant
from tests.trace_tools import encode

BATCHES = [20, *[1] * 12, 3, *[1] * 12, 40, *[1] * 20]  # prefill and decode, batches larger than the cache


def check(path: Path, live: tuple[int, ...]) -> None:
    trace = read_trace(path)
    assert trace.end is not None and trace.end[:4] == live
    assert encode(trace) == path.read_bytes(), "what native wrote is what the format says"
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
    assert trace.top_k == 2 and trace.policy == "adaptive"
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
    code = """
import resource, sys
from llama_expert_pack import UsageError
from tests.runtime.packed import load
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # less than the header
try:
    load(sys.argv[1], expert_trace=sys.argv[2])
except UsageError as error:
    print(error)
"""
    run = run_python(code, variant("two-groups", tmp_path), tmp_path / "full.trace")
    assert "full.trace: the expert trace can't be written: File too large; give a file" in run.stdout, run.stderr


@pytest.mark.timeout(60)
def test_a_trace_is_a_regular_file(tmp_path: Path) -> None:
    path = variant("two-groups", tmp_path)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/full")
    for name, what in (("fifo", "it is a FIFO"), ("link", "it is a character device"), (".", "Is a directory")):
        with pytest.raises(UsageError, match=f": the expert trace can't be written: {what}"):
            load(path, expert_trace=tmp_path / name)


def test_only_traces_are_written_over_and_one_run_at_a_time(tmp_path: Path) -> None:
    path = variant("two-groups", tmp_path)
    other, trace = tmp_path / "notes.txt", tmp_path / "x.trace"
    other.write_text("precious")
    with pytest.raises(UsageError, match=r"notes.txt: .*something else than an expert trace, which would be lost"):
        load(path, expert_trace=other)
    assert other.read_text() == "precious"
    for n_tokens in (5, 1):  # the second one is shorter
        with loaded(path, expert_trace=trace) as llm:
            evaluate(llm, [n_tokens])
            copy = tmp_path / "copy.gguf"
            shutil.copy(path, copy)
            with pytest.raises(UsageError, match=r"x.trace: .*it is being written by another run"):
                load(copy, expert_pack=find_pack(path), expert_trace=trace)
        assert read_trace(trace).number[-1] == 2 * n_tokens


@pytest.mark.parametrize("option", ["expert_trace", "expert_stats_path"])
def test_the_model_and_its_pack_are_never_written_over(option: str, tmp_path: Path) -> None:
    path = variant("split-by-tensor", tmp_path)
    shard = path.with_name(path.name.replace("00001-of", "00002-of"))
    pack = find_pack(path)
    files = [path, shard, pack, manifest_path(pack)]
    names = ["the model", f"shard {shard.name} of the model", "the pack", "the pack's manifest"]
    before = [file.read_bytes() for file in files]
    for i, (file, name) in enumerate(zip(files, names, strict=True)):
        (tmp_path / f"{i}.soft").symlink_to(file)
        (tmp_path / f"{i}.hard").hardlink_to(file)
        for given in (file, tmp_path / f"{i}.soft", tmp_path / f"{i}.hard"):
            with pytest.raises(UsageError, match=f"{option} is the same file as {name}: give it a file of its own"):
                load(path, **{option: given})
    assert [file.read_bytes() for file in files] == before
    for wrong in ("", "a\0b", 7):
        with pytest.raises(UsageError, match=f"{option} must be the path of a file, not"):
            load(path, **{option: wrong})


def test_where_the_models_of_a_router_write(tmp_path: Path) -> None:
    for path, child, expected in (
        ("run.trace", None, "run.trace"),
        ("a.b/run.trace", "org/x:Q4", "a.b/run.org%2Fx%3AQ4.trace"),
        ("run", "..", "run..."),
        ("/dev/null", "x", "/dev/null"),
        (str(tmp_path), "x", str(tmp_path)),
    ):
        assert path_of_child(path, child) == expected
    long = [path_of_child("run.trace", f"{n}".rjust(60, "ü")) for n in range(2)]
    assert long[0] != long[1] and all(len(name) < 200 and name.endswith(".trace") for name in long)


def test_the_first_letters_of_a_trace_are_no_trace(tmp_path: Path) -> None:
    (tmp_path / "x.trace").write_bytes(b"LXP")
    with pytest.raises(UsageError, match=r"holds something else than an expert trace.*; give a file of its own"):
        TraceFile(str(tmp_path / "x.trace")).begin(b"LXPTRACE, one")
    assert (tmp_path / "x.trace").read_bytes() == b"LXP"


def test_a_trace_goes_on_with_the_same_model_only(tmp_path: Path) -> None:
    trace = TraceFile(str(tmp_path / "x.trace"))
    first = trace.begin(b"LXPTRACE, one")
    assert trace.begin(b"LXPTRACE, one") == first
    with pytest.raises(UsageError, match="was begun with another model or policy"):
        trace.begin(b"LXPTRACE, two")
    trace.close()
    trace.close()
    assert (tmp_path / "x.trace").read_bytes() == b"LXPTRACE, one"


def test_trace_and_statistics_in_one_file(tmp_path: Path) -> None:
    path = variant("two-groups", tmp_path)
    with pytest.raises(UsageError, match="x: expert_stats_path is the same file as expert_trace"):
        load(path, expert_trace=tmp_path / "x", expert_stats_path=tmp_path / "." / "x")
    assert not (tmp_path / "x").exists()


def test_an_impossible_top_k(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    with pytest.raises(UsageError, match="must be a whole number from 1 to 5, not 1099511627776"):
        load(path, expert_trace=tmp_path / "x", kv_overrides={"qwen3moe.expert_used_count": 1 << 40})


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
