"""What the figures of host memory as a tier are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.tier_summary import figures

GB = 10**9


def run(side: str, tokens_per_s: float, **stats: int) -> dict[str, Any]:
    phase: dict[str, Any] = {
        "n_tokens": 10,
        "s": 10 / tokens_per_s,
        "tokens_per_s": tokens_per_s,
        "read_bytes": stats.pop("read", 0),
    }
    phase["stats"] = {"h2d_bytes": 0, "host_bytes": 0, **stats}
    cold = {"prefill": {**phase, "tokens_per_s": tokens_per_s / 2, "s": 20 / tokens_per_s}}
    return {"kind": "run", "side": side, "samples": [{"prefill": phase, "decode": phase}], "cold": cold}


def lines(label: str, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    raw = {"kind": "raw", "raw_bytes_per_s": 2 * GB, "copy_bytes_per_s": 50 * GB}
    found: list[dict[str, Any]] = [{"kind": "conditions", "label": label, "block_bytes": GB}, raw, *runs]
    return [{"bench": "compare", "comparison": label, **line} for line in found]


def test_each_figure_is_made_of_the_runs_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "tiers.jsonl"
    runs = [
        *lines("15+15", run("stock-mmap", 2.0), run("ours", 8.0, read=2 * GB, host_bytes=GB), run("ours-no-ram", 4.0)),
        *lines("15+100", run("stock-mmap", 50.0), run("stock-direct-io", 80.0), run("ours", 100.0, host_bytes=2 * GB),
               run("ours-all", 200.0)),
        *lines("k3 fast", {"kind": "run", "side": "ours", "error": "killed"}, run("stock-mmap", 1.0)),
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in runs))
    found = figures(path)
    assert found["tier15_decode_over_stock"] == 4.0 and found["tier15_decode_over_no_tier"] == 2.0
    assert found["tier15_decode_over_ceiling"] == 0.8, "1 s of reading in 1.25 s"
    assert found["tier15_prefill_cold_over_ceiling"] == 0.4
    assert found["tier100_decode_over_stock"] == 1.25, "over the faster one"
    assert found["tier100_step_over_model"] == pytest.approx(0.01 / (1 / 200 + 0.2 / 50), abs=1e-3)
    assert found["k3_tier_decode_over_stock_fast"] is None and found["tier50_decode_over_stock"] is None


def test_prompts_are_compared_over_the_comparisons_of_a_drive(tmp_path: Path) -> None:
    path = tmp_path / "tiers.jsonl"
    ours = run("ours", 8.0, read=2 * GB)
    for sample in ours["samples"]:
        sample["prefill"]["stats"]["misses"] = 1
        sample["decode"] = {**sample["decode"], "read_bytes": GB}
    ours["settled"] = {"read_bytes": 4 * GB, "n_tokens": 20}
    runs = [
        *lines("8k fast", ours, run("ours-all", 10.0)),
        *lines("8k fast before", run("stock-mmap", 2.0), run("ours", 1.0)),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in runs))
    found = figures(path)
    assert found["prompt8k_over_stock_fast"] == 4.0 and found["prompt8k_over_stock_disk"] is None
    assert found["prompt8k_bytes_over_once"] == 2.0 and found["prompt8k_over_ceiling_fast"] == 0.8
    assert found["prompt8k_reads_after_over_before"] == pytest.approx(GB / 10 / (4 * GB / 20), abs=1e-3)


def test_without_results_all_figures_are_unknown(tmp_path: Path) -> None:
    assert set(figures(tmp_path / "none.jsonl").values()) == {None}
