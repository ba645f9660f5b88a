"""The outcome of the runs on a GPU machine, for machines to read.

    python -m bench.gpu.summary [RESULTS_DIR]      reads gpu_*.jsonl there, writes gpu_summary.json

Ratios are means over all rounds in the files; what no file has is null.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.gpu import tier_summary
from lab.identity import COMMON

LARGE, SMALL = "8x64-4096x2048-mxfp4", "48x32-2048x768-mxfp4"

Records = list[dict[str, Any]]


def read(path: Path) -> Records:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 3) if known else None


def identical(records: Records) -> bool | None:
    """Whether all that must be identical was, at every budget; None if something of it was not run."""
    found = [r for r in records if r.get("model") in COMMON]
    if {r["model"] for r in found} != COMMON:
        return None
    return all(r["identical"] and r.get("same_greedy", True) for r in found)


def over_stock(records: Records, model: str, side: str, rates: tuple[str, ...]) -> float | None:
    """Mean of the side's rates over stock's of the same round. A banner starts a run, whose rounds count from 0."""
    run = 0
    samples: dict[tuple[int, int], dict[str, Any]] = {}
    for record in records:
        run += record["benchmark"] == "banner"
        if record["benchmark"] == "resident" and record["model"] == model and record["side"] in ("stock", side):
            samples.setdefault((run, record["round"]), {})[record["side"]] = record
    pairs = [(pair["stock"], pair[side]) for pair in samples.values() if "stock" in pair and side in pair]
    return mean(ours[rate] / stock[rate] for stock, ours in pairs for rate in rates if rate in ours and rate in stock)


def in_turn(records: Records, model: str, phase: str) -> float | None:
    """With all experts in VRAM over without a pack, both in one process."""
    found = [r for r in records if r["benchmark"] == "resident-in-turn" and r["model"] == model]
    return mean(r.get(f"{phase}_ratio") for r in found)


def compared(records: Records, label: str, phase: str) -> dict[str, float | None]:
    """Our side of the comparisons on a drive, with DeepSeek-V4-Flash's shape: over stock's rate, over the ceiling."""
    over_stock: list[float] = []
    over_ceiling: list[float] = []
    sides: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["kind"] != "summary" or record["model_type"] != "deepseek4" or record["label"] != label:
            continue
        if (record["n_gen"] > 0) == (phase == "decode"):
            sides.setdefault(record["comparison"], {})[record["side"]] = record
    for pair in sides.values():
        if "ours" in pair and "stock-mmap" in pair:
            over_stock.append(pair["ours"]["avg_ts"] / pair["stock-mmap"]["avg_ts"])
            over_ceiling.append(pair["ours"]["over_ceiling"])
    return {"over_stock": mean(over_stock), "over_ceiling": mean(over_ceiling)}


def summary(folder: Path) -> dict[str, Any]:
    """Ratios to stock, to the drive's raw rate and to its ceiling; None where a record is missing."""
    resident, missing = read(folder / "gpu_resident_h200.jsonl"), read(folder / "gpu_missing_h200.jsonl")
    comparison = read(folder / "gpu_compare_h200.jsonl")
    banner = next((r for r in reversed(resident) if r["benchmark"] == "banner"), {})
    name, driver, _ = f"{banner.get('gpu') or ''}, , ".split(", ", 2)

    def idle(*rates: str) -> list[float | None]:
        return [over_stock(resident, model, "no-pack", rates) for model in (LARGE, SMALL)]

    # a disk's rate moves by 10 % from pass to pass: the better of two raw passes would count its luck on one side only
    disk = mean(
        r["delivered_bytes_per_s"] / statistics.fmean(r["raw"]["raw_passes_bytes_per_s"])
        for r in missing
        if r["drive"] == "disk" and r["delivered_bytes_per_s"]
    )
    fast = mean(r["delivered_over_raw_copy"] for r in missing if r["drive"] == "shm")

    decode = ("decode_after512_tokens_per_s", "decode_after2048_tokens_per_s")
    return {
        "date": banner.get("date", "")[:10],
        "commit": banner.get("commit"),
        "gpu": name,
        "driver": driver,
        "identical_decode": identical(read(folder / "gpu_identity_h200.jsonl")),
        "patched_idle_over_stock": {"decode": idle(*decode), "prefill512": idle("prefill512_tokens_per_s")},
        "decode_resident_ratio": over_stock(resident, LARGE, "packed", decode),
        "decode_resident_small_experts_ratio": over_stock(resident, SMALL, "packed", decode),
        "prefill512_resident_ratio": over_stock(resident, LARGE, "packed", ("prefill512_tokens_per_s",)),
        "prefill2048_resident_ratio": over_stock(resident, LARGE, "packed", ("prefill2048_tokens_per_s",)),
        "decode_resident_in_turn_ratio": [in_turn(resident, model, "step_after512") for model in (LARGE, SMALL)],
        "delivered_over_raw_disk": disk,
        "delivered_over_raw_fast": fast,
        "decode_over_stock_disk": compared(comparison, "disk", "decode")["over_stock"],
        "decode_over_stock_fast": compared(comparison, "zram", "decode")["over_stock"],
        "prefill_over_stock_disk": compared(comparison, "disk", "prefill")["over_stock"],
        "prefill_over_stock_fast": compared(comparison, "zram", "prefill")["over_stock"],
        "decode_over_ceiling_disk": compared(comparison, "disk", "decode")["over_ceiling"],
        "prefill_over_ceiling_disk": compared(comparison, "disk", "prefill")["over_ceiling"],
        **tier_summary.figures(folder / "gpu_tier_compare_h200.jsonl"),
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "results"
    text = json.dumps(summary(folder), indent=1)
    (folder / "gpu_summary.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
