"""What host memory as a tier comes to, from the lines of bench.compare that bench/gpu/tier_compare.sh writes.

Each value is a mean over the rounds; None where it was not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.compare.results import Line, comparisons, mean_of, of_kind, read_lines

Figures = dict[str, float | None]


def _runs(lines: Sequence[Line], side: str) -> list[Line]:
    return [line for line in of_kind(lines, "run") if line["side"] == side and "error" not in line]


def _phases(lines: Sequence[Line], side: str, phase: str) -> list[Line]:
    """The warm samples of a side, or with "cold" each run's first prompt."""
    if phase == "cold":
        return [run["cold"]["prefill"] for run in _runs(lines, side) if "cold" in run]
    return [sample[phase] for run in _runs(lines, side) for sample in run["samples"]]


def rate(lines: Sequence[Line], side: str, phase: str = "decode") -> float | None:
    """Mean tokens/s."""
    return mean_of(_phases(lines, side, phase), "tokens_per_s")


def over(a: float | None, b: float | None) -> float | None:
    return round(a / b, 3) if a and b else None


def over_best(lines: Sequence[Line], sides: Sequence[str]) -> float | None:
    """Decode of ours over that of the fastest of these sides."""
    rates = [found for side in sides if (found := rate(lines, side))]
    return over(rate(lines, "ours"), max(rates, default=None))


def over_ceiling(lines: Sequence[Line], phase: str) -> float | None:
    """Ours over the rate that the busiest allows: the drive by itself, the link, or computing with all in VRAM."""
    raw = of_kind(lines, "raw")
    drive, link = mean_of(raw, "raw_bytes_per_s"), mean_of(raw, "copy_bytes_per_s")
    parts = _phases(lines, "ours", phase)
    if not parts or not drive or not link:
        return None
    n_tokens = sum(part["n_tokens"] for part in parts)
    moved = sum(part["stats"]["h2d_bytes"] + part["stats"]["host_bytes"] for part in parts)
    computing = rate(lines, "ours-all", "decode" if phase == "decode" else "prefill")
    seconds = [sum(part["read_bytes"] for part in parts) / drive, moved / link]  # of all tokens
    seconds.append(n_tokens / computing if computing else 0.0)
    return float(round(max(seconds) / sum(part["s"] for part in parts), 3))


def step_over_model(lines: Sequence[Line]) -> float | None:
    """A step of ours over computing with all in VRAM and the bytes from host memory at the link's rate, one after the other."""
    link, computing = mean_of(of_kind(lines, "raw"), "copy_bytes_per_s"), rate(lines, "ours-all")
    parts = _phases(lines, "ours", "decode")
    if not parts or not link or not computing:
        return None
    n_tokens = sum(part["n_tokens"] for part in parts)
    moved = sum(part["stats"]["h2d_bytes"] + part["stats"]["host_bytes"] for part in parts) / n_tokens
    return float(round(sum(part["s"] for part in parts) / n_tokens / (1 / computing + moved / link), 3))


def bytes_over_once(lines: Sequence[Line]) -> float | None:
    """Of ours: what a prompt reads over the blocks of the experts that it uses and no memory has. If it is one batch."""
    parts = _phases(lines, "ours", "prefill")
    block_bytes = of_kind(lines, "conditions")[0]["block_bytes"]
    missing = sum(part["stats"]["misses"] for part in parts) * block_bytes
    return over(sum(part["read_bytes"] for part in parts), missing)


def reads_after_prompt(lines: Sequence[Line]) -> float | None:
    """Of ours: drive reads a token right after a prompt over those farther away from one."""
    settled = [run["settled"] for run in _runs(lines, "ours") if "settled" in run]
    after, before = (
        sum(part["read_bytes"] for part in parts) / max(1, sum(part["n_tokens"] for part in parts))
        for parts in (_phases(lines, "ours", "decode"), settled)
    )
    return over(after, before)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 3) if known else None


def figures(path: Path) -> Figures:
    """The keys of gpu_summary.json that tell of the tier, from a results file."""
    by_label: dict[str, list[list[Line]]] = {}
    for lines in comparisons(read_lines(path) if path.exists() else []).values():
        if of_kind(lines, "conditions"):
            by_label.setdefault(of_kind(lines, "conditions")[0]["label"], []).append(lines)

    def at(label: str) -> list[list[Line]]:
        return by_label.get(label, [])

    def decode(label: str, side: str) -> float | None:
        return _mean([over(rate(lines, "ours"), rate(lines, side)) for lines in at(label)])

    def prefill(label: str, side: str) -> float | None:
        return _mean([over(rate(lines, "ours", "prefill"), rate(lines, side, "prefill")) for lines in at(label)])

    def prompt_rate(several: Sequence[Sequence[Line]], side: str) -> float | None:
        """Of all these comparisons: a prompt takes stock so long that it was not always measured beside ours."""
        return _mean([rate(lines, side, "prefill") for lines in several])

    fast, disk = at("8k fast"), at("8k disk") + at("8k disk warm")
    whole = ("stock-direct-io", "stock-mmap", "stock-n-cpu-moe", "stock-ngl")
    return {
        "tier15_decode_over_stock": decode("15+15", "stock-mmap"),
        "tier15_decode_over_no_tier": decode("15+15", "ours-no-ram"),
        "tier15_decode_over_ceiling": _mean([over_ceiling(lines, "decode") for lines in at("15+15")]),
        "tier15_prefill_over_stock": prefill("15+15", "stock-mmap"),
        "tier15_prefill_cold_over_ceiling": _mean([over_ceiling(lines, "cold") for lines in at("15+15")]),
        "tier50_decode_over_stock": decode("15+50", "stock-mmap"),
        "tier100_decode_over_stock": _mean([over_best(lines, whole[:2]) for lines in at("15+100")]),
        "tier100_decode_over_stock_4_threads": _mean([over_best(lines, whole[:2]) for lines in at("15+100 4 threads")]),
        "tier100_step_over_model": _mean([step_over_model(lines) for lines in at("15+100")]),
        "overflow_decode_over_stock": _mean([over_best(lines, whole) for lines in at("60+40")]),
        "overflow_decode_over_stock_4_threads": _mean([over_best(lines, whole) for lines in at("60+40 4 threads")]),
        "overflow_decode_over_vram": decode("60+40", "ours-all"),
        "prompt8k_bytes_over_once": _mean([bytes_over_once(lines) for lines in fast + disk]),
        "prompt8k_over_ceiling_fast": _mean([over_ceiling(lines, "prefill") for lines in fast]),
        "prompt8k_over_ceiling_disk": _mean([over_ceiling(lines, "prefill") for lines in disk]),
        "prompt8k_over_stock_fast": over(
            prompt_rate(fast, "ours"), prompt_rate(at("8k fast before") + fast, "stock-mmap")
        ),
        "prompt8k_over_stock_disk": over(prompt_rate(disk, "ours"), prompt_rate(disk, "stock-mmap")),
        "prompt8k_reads_after_over_before": _mean([reads_after_prompt(lines) for lines in fast]),
        "k3_tier_decode_over_stock_disk": decode("k3 disk", "stock-mmap"),
        "k3_tier_decode_over_stock_fast": decode("k3 fast", "stock-mmap"),
    }
