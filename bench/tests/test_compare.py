"""The comparison's own arithmetic: statistics, ceilings, table, step model; and what it says where it cannot run."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.banner import block_queues
from bench.compare import conditions, step_model
from bench.compare.__main__ import ram_cap_bytes, read_prompts, run_side
from bench.compare.report import headline, markdown, number, table
from bench.compare.results import agreement, ceiling_ts, comparisons, read_lines, rows, speedup, summaries
from bench.compare.side import draw_tokens
from bench.compare.sides import ALL, SideSpec, Sizes, plan_sides
from bench.gpu.samples import GpuSamples
from lab import memory_cap
from llama_expert_pack.pypack.errors import UsageError

GB = 10**9
LLAMA_BENCH_KEYS = {
    "build_commit", "cpu_info", "gpu_info", "model_filename", "model_type", "model_size", "n_threads", "n_ubatch",
    "n_prompt", "n_gen", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts",
}  # fmt: skip


def conditions_line(**changed: Any) -> dict[str, Any]:
    line = {
        "kind": "conditions", "date": "2026-01-02", "commit": "abc", "build_commit": "abc", "cpu": "cpu",
        "cpu_info": "cpu", "cores": 2, "memory_gib": 8, "kernel": "6", "gpu": None, "gpu_info": None,
        "file_system": "ext4", "label": "disk", "model_filename": "m.gguf", "model_type": "deepseek4",
        "model_size": 11 * GB, "expert_bytes": 10 * GB, "block_bytes": 10_000_000, "n_layers": 4, "n_expert": 8,
        "top_k": 2, "cache_bytes": GB, "ram_cap_bytes": 2 * GB, "n_threads": 2, "n_ubatch": 512, "cold": "cold",
        "read_ahead": "read-ahead 128 KB", "titles": {"stock-mmap": "stock, mmap", "ours": "ours"}, "references": [],
        "left_out": {}, "cap_problem": "", "read_splits": 4, "stage_slots": 12,
    }  # fmt: skip
    return line | changed


def phase(n_tokens: int, seconds: float, read_bytes: int, **more: Any) -> dict[str, Any]:
    return {"n_tokens": n_tokens, "s": seconds, "tokens_per_s": n_tokens / seconds, "read_bytes": read_bytes, **more}


BURSTS = {"burst_s": {"1": 0.011, "2": 0.021, "4": 0.041}, "wave_blocks": 4.0}


def counted(hits: int, misses: int, wait_s: float) -> dict[str, Any]:
    return {"stats": {"hits": hits, "misses": misses, "wait_s": wait_s, "loads": misses, "provider_calls": misses // 2}}


def run_line(side: str, round_: int, decode: dict[str, Any], chosen: tuple[int, ...] = (1, 2, 3)) -> dict[str, Any]:
    sample = {"prefill": phase(64, 2.0, 4 * GB), "decode": decode, "chosen": list(chosen)}
    return {"kind": "run", "side": side, "round": round_, "load_s": 1.0, "samples": [sample], "rss_peak_bytes": GB}


def lines() -> list[dict[str, Any]]:
    """Stock decodes 10 tokens in 10 s and in 5 s; ours in 2 s, reading 2 GB in 1.6 s."""
    found = [
        conditions_line(),
        {"kind": "raw", "round": 0, "raw_bytes_per_s": 1.0 * GB, **BURSTS},
        {"kind": "raw", "round": 1, "raw_bytes_per_s": 2.0 * GB, **BURSTS},
        run_line("stock-mmap", 0, phase(10, 10.0, 3 * GB)),
        run_line("ours", 0, phase(10, 2.0, 2 * GB, **counted(300, 200, 1.6))),
        run_line("ours", 1, phase(10, 2.0, 2 * GB, **counted(300, 200, 1.6)), chosen=(1, 2, 9)),
        run_line("stock-mmap", 1, phase(10, 5.0, 3 * GB)),
    ]
    return [{"bench": "compare", "comparison": "one", **line} for line in found]


def row_of(side: str, phase_name: str) -> Any:
    return next(row for row in rows(lines()) if (row.side, row.phase) == (side, phase_name))


def test_mean_and_deviation_are_those_of_the_samples() -> None:
    stock = row_of("stock-mmap", "decode")
    assert stock.samples_ts == [1.0, 2.0]
    assert stock.mean_ts == 1.5
    assert stock.sd_ts == statistics.stdev([1.0, 2.0])


def test_ceiling_is_the_mean_raw_rate_over_the_bytes_of_a_token() -> None:
    ours = row_of("ours", "decode")
    assert ours.read_bytes_per_token == 0.2 * GB
    assert ours.ceiling_ts == pytest.approx(1.5 / 0.2)
    assert ours.over_ceiling == pytest.approx(5 / 7.5)
    assert ours.hit_rate == 0.6


def test_delivered_counts_the_time_waited_and_for_stock_all_of_it() -> None:
    assert row_of("ours", "decode").delivered_bytes_per_s == pytest.approx(2 * GB / 1.6)
    assert row_of("stock-mmap", "decode").delivered_bytes_per_s == pytest.approx(6 * GB / 15)


def test_nothing_read_or_no_rate_has_no_ceiling() -> None:
    assert ceiling_ts(1e9, 0) is None
    assert ceiling_ts(None, 5) is None


def test_speedup_is_of_the_means() -> None:
    assert speedup(lines(), "decode") == pytest.approx(5 / 1.5)
    assert speedup(lines(), "decode", over="stock-gpu") is None


def test_summaries_have_the_keys_of_llama_bench() -> None:
    found = summaries(lines())
    assert len(found) == 4
    assert all(set(summary) >= LLAMA_BENCH_KEYS for summary in found)
    prefill, decode = found[:2]
    assert (prefill["n_prompt"], prefill["n_gen"]) == (64, 0)
    assert (decode["n_prompt"], decode["n_gen"]) == (0, 10)
    assert decode["samples_ns"] == [10_000_000_000, 5_000_000_000]
    assert json.loads(json.dumps(found)) == found


def test_the_text_opens_with_what_it_shows() -> None:
    text = markdown(lines())
    assert text.startswith("**m.gguf, disk: the pack decodes 3.33 times as fast as stock with mmap")
    assert text.index("| side |") < text.index("read-ahead 128 KB")


def test_the_table_has_a_row_for_each_side_and_phase() -> None:
    found = table(lines()).splitlines()
    assert len(found) == 2 + 4
    assert len({line.count("|") for line in found}) == 1
    assert "| 1.50 ± 0.71 | 1.00, 2.00 | 300 | - |" in found[3]


def test_a_side_that_failed_is_named_and_not_counted() -> None:
    failed = [line for line in lines() if line.get("side") != "stock-mmap"]
    failed.append({"kind": "run", "side": "stock-mmap", "round": 0, "error": "killed: out of memory under the cap"})
    assert speedup(failed, "decode") is None
    assert "no result for stock with mmap" in headline(failed)
    assert "stock-mmap, round 0: killed: out of memory under the cap" in markdown(failed)


def test_agreement_compares_with_the_first_run_of_stock() -> None:
    assert agreement(lines()) == {"ours": 1.0}  # of the same round
    later = [line for line in lines() if line.get("side") != "ours" or line["round"] == 1]
    assert agreement(later)["ours"] == pytest.approx(2 / 3)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines()) + '\n{"bench": "comp')
    assert len(read_lines(path)) == len(lines())
    assert list(comparisons(read_lines(path))) == ["one"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0"), (1234.5, "1234"), (0.01234, "0.0123"), (9.996, "10.00")]
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_burst_times_give_latency_and_seconds_a_block() -> None:
    latency_s, block_s = step_model.fit_bursts([{"1": 0.011, "2": 0.021, "4": 0.041}])
    assert latency_s == pytest.approx(0.001)
    assert block_s == pytest.approx(0.010)


def test_the_step_model_adds_reading_to_computing_measured_elsewhere() -> None:
    whole = run_line("ours-all", 0, phase(10, 0.5, 0, **counted(500, 0, 0.1)))
    model = step_model.build([*lines(), {"bench": "compare", "comparison": "one", **whole}])
    assert model is not None
    assert (model.fetches, model.blocks) == (10, 20)
    step = model.step()
    assert step.compute_s == pytest.approx(0.04)
    assert step.read_s == pytest.approx(10 * 0.001 + 20 * 0.010), "all of both experts is missing: nothing to compute"
    assert (step.copy_s, step.host_s) == (0, 0)


def test_copies_cost_what_reading_does_not_hide() -> None:
    """Reading is faster than copying here: it hides 1 ms of each 3, and the last wave has nothing to hide behind."""
    model = step_model.StepModel(0.0, 0.001, 0.003, 0.0, 0.0, fetches=2, blocks=4, wave_blocks=0.5, basis="")
    assert model.step().read_s == pytest.approx(4 * 0.001)
    assert model.step().copy_s == pytest.approx(2 * ((0.006 - 0.002) + 0.0015))
    at_once = replace(model, wave_blocks=16)
    assert at_once.step().copy_s == pytest.approx(2 * ((0.006 - 0.002) + 0.006))


def test_on_a_cpu_resident_experts_hide_reading() -> None:
    model = step_model.StepModel(
        0.0, 0.002, 0.0, 0.1, 0.0, fetches=2, blocks=4, wave_blocks=1, basis="", overlap_s=0.003
    )
    assert model.step().read_s == pytest.approx(2 * (0.004 - 0.003))
    assert replace(model, overlap_s=1.0).step().total_s == pytest.approx(0.1)


def test_without_references_there_is_no_model() -> None:
    assert step_model.build(lines()) is None
    assert step_model.section(lines()) == ""


def test_with_a_reference_there_is_one() -> None:
    whole = run_line("ours-all", 0, phase(10, 0.5, 0, **counted(500, 0, 0.1)))
    assert step_model.section([*lines(), {"bench": "compare", "comparison": "one", **whole}]) != ""


def test_extrapolation_takes_the_targets_rates_and_depth() -> None:
    model = step_model.StepModel(0.0005, 0.01, 0.001, 0.02, 0.004, 3, 6, 4, "")
    target = step_model.Target("t", "a", 8, 0.5, 20e6, 1e9, 0.5)
    found = step_model.extrapolate(model, conditions_line(), target)
    assert found.read_s == 0.5
    assert found.compute_s == pytest.approx(0.02 * 2 / 0.5)
    assert found.host_s == pytest.approx(0.008)
    assert found.blocks == pytest.approx(8 * 2 * 0.5)
    assert found.fetches == pytest.approx(8 * 0.75)


def test_tokens_are_the_same_for_both_sides_and_skewed() -> None:
    tokens = draw_tokens(2000, 1000, 1.0, seed=5)
    assert tokens == draw_tokens(2000, 1000, 1.0, seed=5)
    assert tokens != draw_tokens(2000, 1000, 1.0, seed=6)
    assert min(tokens) >= 0
    assert max(tokens) < 1000
    often = [max(map(draw.count, set(draw))) for draw in (tokens, draw_tokens(2000, 1000, 0.0, seed=5))]
    assert often[0] > 2 * often[1]


def test_a_share_as_cap_leaves_the_page_cache_that_share_of_the_experts() -> None:
    assert ram_cap_bytes("15%", 100, 1000) == 250
    assert ram_cap_bytes("8GiB", 100, 1000) == 8 << 30
    assert ram_cap_bytes(None, 100, 1000) is None


def test_sides_that_do_not_fit_are_left_out_with_the_reason() -> None:
    sizes = Sizes(model=100 * GB, experts=90 * GB, cache=10 * GB, cap=20 * GB, memory_free=200 * GB, vram=None)
    sides, left_out = plan_sides(sizes, "p", {})
    assert [side.name for side in sides] == ["stock-mmap", "ours", "ours-all"]
    assert left_out == {"stock-direct-io": "needs 100.0 GB of memory, 20.0 GB allowed"}
    assert [side.capped for side in sides] == [True, True, False]


def test_a_side_that_dies_is_told_by_its_assertion() -> None:
    lines = ["loading", "ggml.c:205: GGML_ASSERT(buffer) failed", "libggml.so(ggml_abort+0x1)", "python3(_start+0x25)"]
    spec = SideSpec("ours", "ours", stock=False)
    program = f"import os, sys; print({chr(10).join(lines)!r}, file=sys.stderr, flush=True); os.abort()"
    assert (
        run_side([sys.executable, "-c", program], spec, 60) == "exit status -6: ggml.c:205: GGML_ASSERT(buffer) failed"
    )
    assert run_side([sys.executable, "-c", "print('what'); exit(3)"], spec, 60) == "exit status 3: what"


def test_on_a_gpu_stock_keeps_its_experts_on_the_host() -> None:
    sizes = Sizes(model=100 * GB, experts=90 * GB, cache=10 * GB, cap=None, memory_free=200 * GB, vram=140 * GB)
    sides, left_out = plan_sides(sizes, "p", {"expert_read_splits": 2})
    by_name = {side.name: side for side in sides}
    assert not left_out
    assert set(by_name) == {"stock-mmap", "ours", "stock-direct-io", "stock-gpu", "ours-all"}
    assert by_name["stock-mmap"].cpu_layers == ALL
    assert by_name["stock-gpu"].cpu_layers == 0
    assert by_name["stock-gpu"].reference
    assert by_name["ours"].options["expert_cache"] == 10 * GB
    assert by_name["ours"].options["expert_read_splits"] == 2
    _, left_out = plan_sides(Sizes(100 * GB, 90 * GB, GB, None, 200 * GB, 32 * GB), "p", {})
    assert left_out["stock-gpu"] == "needs 100.0 GB of VRAM, 32.0 GB free"


def test_stock_gets_as_much_vram_as_our_cache_takes() -> None:
    sizes = Sizes(100 * GB, 80 * GB, 20 * GB, None, 200 * GB, 140 * GB, ram=8 * GB, n_layers=40)
    sides, _ = plan_sides(sizes, "p", {}, offload=True)
    by_name = {side.name: side for side in sides}
    assert by_name["stock-n-cpu-moe"].cpu_layers == 30, "10 of 40 layers' experts are 20 GB"
    assert by_name["stock-ngl"].gpu_layers == 16, "16 of 40 layers of 2.5 GB are 20 GB of experts and a trunk of 20 GB"
    assert by_name["ours"].options["expert_ram"] == 8 * GB
    assert by_name["ours-no-ram"].options["expert_ram"] == 0


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[1]", "[]"])
def test_prompts_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"p\.json"):
        read_prompts(path)


def test_prompts_come_from_lines_or_json(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    (tmp_path / "p.json").write_text('[{"prompt": "one"}, "two"]')
    assert read_prompts(tmp_path / "p.txt") == read_prompts(tmp_path / "p.json") == ["one", "two"]


def test_version_2_groups_get_the_memory_controller(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    assert memory_cap.find_memory_groups(tmp_path) == (tmp_path, "")
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"


def test_version_1_groups_are_found(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1")
    assert memory_cap.find_memory_groups(tmp_path) == (tmp_path / "memory", "")


def test_no_way_to_cap_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_cap, "find_memory_groups", lambda: (None, f"{tmp_path} has no memory controller"))
    monkeypatch.setenv("PATH", str(tmp_path))  # no systemd-run
    with pytest.raises(UsageError) as caught, memory_cap.memory_cap(8 << 30):
        pass
    text = str(caught.value)
    assert "capped at 8.0 GiB" in text
    assert f"{tmp_path} has no memory controller" in text
    assert "leave out --ram-cap" in text
    assert "\n" not in text


def test_without_a_cap_the_command_stays() -> None:
    with memory_cap.memory_cap(None) as cap:
        assert cap.command(["a", "b"]) == ["a", "b"]
        assert cap.peak_bytes() is None


def test_queues_of_a_partition_and_of_what_a_mapper_lies_on(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    number_ = f"{device >> 8 & 0xFFF}:{(device & 0xFF) | (device >> 12 & 0xFFF00)}"
    disk = tmp_path / "devices" / "sda"
    (disk / "queue").mkdir(parents=True)
    (disk / "sda1").mkdir()
    mapper = tmp_path / "devices" / "dm-0"
    (mapper / "queue").mkdir(parents=True)
    (mapper / "slaves").mkdir()
    (mapper / "slaves" / "sda1").symlink_to(disk / "sda1")
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / number_).symlink_to(mapper)
    assert block_queues(tmp_path, tmp_path / "block") == [mapper / "queue", disk / "queue"]


def test_read_ahead_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "read_ahead_kb").write_text("8192\n")
    monkeypatch.setattr(conditions, "block_queues", lambda path: [tmp_path])
    with conditions.read_ahead([tmp_path], 128) as sentence:
        assert sentence == "read-ahead 128 KB (was 8192)"
        assert (tmp_path / "read_ahead_kb").read_text() == "128"
    assert (tmp_path / "read_ahead_kb").read_text() == "8192"


def test_energy_is_the_mean_power_over_the_time() -> None:
    samples = GpuSamples()
    for line in ("2026/01/02 03:04:05.000, 10, 100.0", "2026/01/02 03:04:06.000, 30, 300.0", "nonsense"):
        samples.add(line)
    samples.add("2026/01/02 03:04:07.000, 20, [N/A]")
    start = samples.samples[0][0]
    assert samples.vram_peak_bytes() == 30 << 20
    assert samples.joules(start - 0.5, start + 1.5) == pytest.approx(400.0)
    assert samples.joules(start + 5, start + 6) is None
