"""The lines that bench.compare writes, and the figures that follow from them.

Lines of one comparison share `comparison`; their `kind` is conditions (one), raw (one a round: the drive by itself), run
(one for each side and round) or summary (llama-bench's keys and ours).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("prefill", "decode")
Line = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One side in one phase, over all its samples. Rates are tokens/s, energies joules a token."""

    side: str
    title: str
    phase: str
    samples_ts: list[float]
    seconds: list[float]
    n_tokens: int
    read_bytes_per_token: float
    hit_rate: float | None
    delivered_bytes_per_s: float | None
    ceiling_ts: float | None
    ceiling_copy_ts: float | None
    joules_per_token: float | None

    @property
    def mean_ts(self) -> float:
        """Mean of the samples, tokens/s."""
        return statistics.fmean(self.samples_ts)

    @property
    def sd_ts(self) -> float:
        """Standard deviation of the samples; 0 for one sample, as in llama-bench."""
        return statistics.stdev(self.samples_ts) if len(self.samples_ts) > 1 else 0.0

    @property
    def over_ceiling(self) -> float | None:
        """Mean tokens/s over those that the drive allows, 0..1; None where there is no ceiling."""
        return self.mean_ts / self.ceiling_ts if self.ceiling_ts else None


def read_lines(path: Path) -> list[Line]:
    """The lines of a results file; a last line that was cut off is left out."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line.get("bench") == "compare":
            found.append(line)
    return found


def of_kind(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def ceiling_ts(bytes_per_s: float | None, bytes_per_token: float) -> float | None:
    """Tokens/s at which the drive is busy all the time; None where nothing is read or the rate is unknown."""
    return bytes_per_s / bytes_per_token if bytes_per_s and bytes_per_token > 0 else None


def mean_of(lines: Sequence[Line], name: str) -> float | None:
    """Mean of the lines that have a value of this name; None if none has."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return statistics.fmean(values) if values else None


def rows(lines: Sequence[Line]) -> list[Row]:
    """All sides of one comparison that have results, in the order of their first run."""
    conditions, raw = of_kind(lines, "conditions")[0], of_kind(lines, "raw")
    raw_rate, copy_rate = mean_of(raw, "raw_bytes_per_s"), mean_of(raw, "raw_copy_bytes_per_s")
    runs: dict[str, list[Line]] = {}
    for line in of_kind(lines, "run"):
        if "error" not in line:
            runs.setdefault(line["side"], []).append(line)
    found = []
    for side, title in conditions["titles"].items():
        samples = [sample for run in runs.get(side, []) for sample in run["samples"]]
        for phase in PHASES if samples else ():
            parts = [sample[phase] for sample in samples]
            n_tokens = sum(part["n_tokens"] for part in parts)
            seconds = sum(part["s"] for part in parts)
            read_bytes = sum(part["read_bytes"] for part in parts)
            stats = [part["stats"] for part in parts if "stats" in part]
            hits, misses = sum(s["hits"] for s in stats), sum(s["misses"] for s in stats)
            waited_s = sum(s["wait_s"] for s in stats) if stats else seconds
            joules = [part["joules"] for part in parts if part.get("joules") is not None]
            per_token = read_bytes / n_tokens
            found.append(
                Row(
                    side=side,
                    title=title,
                    phase=phase,
                    samples_ts=[part["tokens_per_s"] for part in parts],
                    seconds=[part["s"] for part in parts],
                    n_tokens=parts[0]["n_tokens"],
                    read_bytes_per_token=per_token,
                    hit_rate=hits / (hits + misses) if hits + misses else None,
                    delivered_bytes_per_s=read_bytes / waited_s if read_bytes and waited_s else None,
                    ceiling_ts=ceiling_ts(raw_rate, per_token),
                    ceiling_copy_ts=ceiling_ts(copy_rate, per_token),
                    joules_per_token=sum(joules) / n_tokens if len(joules) == len(parts) else None,
                )
            )
    return found


def summaries(lines: Sequence[Line]) -> list[Line]:
    """One line for each side and phase, with llama-bench's keys and ours."""
    conditions = of_kind(lines, "conditions")[0]
    same = (
        "build_commit",
        "cpu_info",
        "gpu_info",
        "model_filename",
        "model_type",
        "model_size",
        "n_threads",
        "n_ubatch",
    )
    return [
        {
            **{key: conditions[key] for key in same},
            "test_time": conditions["date"],
            "label": conditions["label"],
            "side": row.side,
            "n_prompt": row.n_tokens if row.phase == "prefill" else 0,
            "n_gen": row.n_tokens if row.phase == "decode" else 0,
            "avg_ns": int(statistics.fmean(row.seconds) * 1e9),
            "stddev_ns": int(statistics.stdev(row.seconds) * 1e9) if len(row.seconds) > 1 else 0,
            "avg_ts": row.mean_ts,
            "stddev_ts": row.sd_ts,
            "samples_ns": [int(s * 1e9) for s in row.seconds],
            "samples_ts": row.samples_ts,
            "read_bytes_per_token": row.read_bytes_per_token,
            "hit_rate": row.hit_rate,
            "delivered_bytes_per_s": row.delivered_bytes_per_s,
            "ceiling_ts": row.ceiling_ts,
            "ceiling_copy_ts": row.ceiling_copy_ts,
            "over_ceiling": row.over_ceiling,
            "joules_per_token": row.joules_per_token,
        }
        for row in rows(lines)
    ]


def speedup(lines: Sequence[Line], phase: str, of: str = "ours", over: str = "stock-mmap") -> float | None:
    """Mean tokens/s of one side over another's; None if either has no result."""
    means = {row.side: row.mean_ts for row in rows(lines) if row.phase == phase}
    return means[of] / means[over] if of in means and over in means else None


def agreement(lines: Sequence[Line]) -> dict[str, float]:
    """Share of steps at which a side chose the token that stock with mmap chose, for each other side."""
    chosen = {
        line["side"]: [token for sample in line["samples"] for token in sample["chosen"]]
        for line in reversed(of_kind(lines, "run"))
        if "error" not in line
    }
    reference = chosen.pop("stock-mmap", None)
    if reference is None:
        return {}
    return {
        side: statistics.fmean(a == b for a, b in zip(reference, other, strict=True)) for side, other in chosen.items()
    }


def comparisons(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines of each comparison, by its name."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line["comparison"], []).append(line)
    return found
