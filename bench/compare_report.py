"""What bench.compare wrote, as a table: rates beside the ceilings that bound them.

    python -m bench.compare_report compare.jsonl [--out FOLDER]

Works on the results of a run that was cut off, too. With --out it writes report.md and, if matplotlib is installed,
charts.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

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
        return statistics.fmean(self.samples_ts)

    @property
    def sd_ts(self) -> float:
        """Standard deviation of the samples; 0 for one sample, as in llama-bench."""
        return statistics.stdev(self.samples_ts) if len(self.samples_ts) > 1 else 0.0

    @property
    def over_ceiling(self) -> float | None:
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


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, without exponents; a dash for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def headline(lines: Sequence[Line]) -> str:
    """One sentence: what the comparison shows."""
    conditions = of_kind(lines, "conditions")[0]
    decode, prefill = speedup(lines, "decode"), speedup(lines, "prefill")
    if decode is None or prefill is None:
        return (
            f"**{conditions['model_filename']}, {conditions['label']}: no result for stock with mmap and ours both.**"
        )
    bound = next((r.over_ceiling for r in rows(lines) if r.side == "ours" and r.phase == "decode"), None)
    near = f", decode at {number(bound, 2)} of what the drive allows" if bound else ""
    return (
        f"**{conditions['model_filename']}, {conditions['label']}: the pack decodes {number(decode)} times as fast as "
        f"stock with mmap and prefills {number(prefill)} times as fast{near}.**"
    )


def table(lines: Sequence[Line]) -> str:
    head = (
        "| side | phase | tokens/s | samples | MB read per token | hit rate | GB/s while loading | ceiling, tokens/s "
        "| of ceiling | J/token |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    body = []
    references = of_kind(lines, "conditions")[0]["references"]
    for row in rows(lines):
        spread = f" ± {number(row.sd_ts, 2)}" if len(row.samples_ts) > 1 else ""
        ceiling = number(row.ceiling_ts)
        if row.ceiling_copy_ts:
            ceiling += f" ({number(row.ceiling_copy_ts)} with copy)"
        cells = (
            row.title + (" *" if row.side in references else ""),
            f"{row.phase} {row.n_tokens}",
            number(row.mean_ts) + spread,
            ", ".join(number(x) for x in row.samples_ts),
            number(row.read_bytes_per_token / 1e6),
            "-" if row.hit_rate is None else f"{row.hit_rate:.1%}",
            number(row.delivered_bytes_per_s / 1e9) if row.delivered_bytes_per_s else "-",
            ceiling,
            number(row.over_ceiling, 2),
            number(row.joules_per_token),
        )
        body.append("| " + " | ".join(cells) + " |")
    return "\n".join([head, *body])


def machine_table(lines: Sequence[Line]) -> str:
    """Memory and start of each side: the largest of its runs."""
    found = ["| side | first token after | of it load | peak RSS | not of files | peak VRAM | peak of the group |"]
    found.append("|---|---|---|---|---|---|---|")
    runs = [line for line in of_kind(lines, "run") if "error" not in line]
    for side, title in of_kind(lines, "conditions")[0]["titles"].items():
        mine = [run for run in runs if run["side"] == side]
        if not mine:
            continue

        def most(name: str, mine: list[Line] = mine) -> str:
            values = [run[name] for run in mine if run.get(name) is not None]
            return f"{number(max(values) / 1e9)} GB" if values else "-"

        load_s = statistics.fmean(run["load_s"] for run in mine)
        first_s = statistics.fmean(run["load_s"] + run["samples"][0]["prefill"]["s"] for run in mine)
        memory = [
            most(name) for name in ("rss_peak_bytes", "rss_anonymous_bytes", "vram_peak_bytes", "cgroup_peak_bytes")
        ]
        found.append(f"| {title} | {number(first_s)} s | {number(load_s)} s | {' | '.join(memory)} |")
    return "\n".join(found)


def conditions_text(lines: Sequence[Line]) -> str:
    c, raw = of_kind(lines, "conditions")[0], of_kind(lines, "raw")
    cap = (
        f"memory and page cache capped at {c['ram_cap_bytes'] / 1e9:.2f} GB"
        if c["ram_cap_bytes"]
        else "no cap on memory"
    )
    raw_rates = ", ".join(number(line["raw_bytes_per_s"] / 1e9) for line in raw)
    copies = ", ".join(number(x["raw_copy_bytes_per_s"] / 1e9) for x in raw if "raw_copy_bytes_per_s" in x)
    text = [
        f"- {c['cpu']}, {c['cores']} cores, {c['memory_gib']} GiB; GPU {c['gpu'] or 'none'}; kernel {c['kernel']}; "
        f"{c['file_system']}; {c['date']}; commit {c['build_commit']}.",
        f"- {c['model_type']}, {c['n_layers']} expert layers, top-{c['top_k']} of {c['n_expert']}; experts "
        f"{c['expert_bytes'] / 1e9:.2f} GB in blocks of {c['block_bytes'] / 1e6:.2f} MB, cache of ours "
        f"{c['cache_bytes'] / 1e9:.2f} GB ({c['cache_bytes'] / c['expert_bytes']:.1%}); {cap}.",
        f"- {c['cold']}; {c['read_ahead']}; {c['n_threads']} threads.",
        f"- Raw O_DIRECT rate of the pack, blocks at random, {c['stage_slots']} threads: {raw_rates} GB/s"
        + (f"; with the copy to the GPU: {copies} GB/s." if copies else "."),
        "- The ceiling is the raw rate over the bytes read per token: computing counts as nothing.",
    ]
    if c["references"]:
        text.append("- \\* has more memory than the comparison allows; runs once, to know what computing takes.")
    text += [f"- {side}: not run, {why}." for side, why in c["left_out"].items()]
    text += [
        f"- {line['side']}, round {line['round']}: {line['error']}" for line in of_kind(lines, "run") if "error" in line
    ]
    text += [f"- Tokens as stock's with mmap: {side} {share:.1%}." for side, share in agreement(lines).items()]
    return "\n".join(text)


def markdown(lines: Sequence[Line]) -> str:
    """One comparison: what it shows, the table, then its conditions."""
    if not of_kind(lines, "conditions"):
        return ""
    return "\n\n".join([headline(lines), table(lines), machine_table(lines), conditions_text(lines)]) + "\n"


def comparisons(lines: Sequence[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line["comparison"], []).append(line)
    return found


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for report.md and charts.")
def main(results: Path, out: Path | None) -> None:
    texts = []
    for group in comparisons(read_lines(results)).values():
        texts.append(markdown(group))
    print("\n".join(texts))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.md").write_text("\n".join(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
