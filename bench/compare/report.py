"""What bench.compare wrote, as a table: rates beside the ceilings that bound them.

    python -m bench.compare.report compare.jsonl [--out FOLDER]

Works on the results of a run that was cut off, too. With --out it writes report.md and, if matplotlib is installed,
charts.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from bench.compare import charts, step_model
from bench.compare.results import PHASES, Line, agreement, comparisons, of_kind, read_lines, rows, speedup


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
    """Markdown: a row for each side and phase."""
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


MEMORY = {
    "peak RSS": "rss_peak_bytes",
    "not of files": "rss_anonymous_bytes",
    "peak VRAM": "vram_peak_bytes",
    "peak of the group": "cgroup_peak_bytes",
    "page cache at the end": "page_cache_end_bytes",
}


def machine_table(lines: Sequence[Line]) -> str:
    """Start and memory of each side; of memory the largest of its runs."""
    found = [f"| side | first token after | of it load | {' | '.join(MEMORY)} |", "|---" * (3 + len(MEMORY)) + "|"]
    for side, title in of_kind(lines, "conditions")[0]["titles"].items():
        runs = [run for run in of_kind(lines, "run") if run["side"] == side and "error" not in run]
        if not runs:
            continue
        load_s = statistics.fmean(run["load_s"] for run in runs)
        first_s = statistics.fmean(run["load_s"] + run["samples"][0]["prefill"]["s"] for run in runs)
        cells = [f"{number(first_s)} s", f"{number(load_s)} s"]
        for name in MEMORY.values():
            values = [run[name] for run in runs if run.get(name) is not None]
            cells.append(f"{number(max(values) / 1e9)} GB" if values else "-")
        found.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(found)


def conditions_text(lines: Sequence[Line]) -> str:
    """Markdown: a list of what the figures hold for, with the sides that did not run."""
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


def markdown(lines: Sequence[Line], everything: Sequence[Line] = ()) -> str:
    """One comparison: what it shows, the table, then its conditions and what the step model says."""
    if not of_kind(lines, "conditions"):
        return ""
    parts = [headline(lines), table(lines), machine_table(lines), conditions_text(lines)]
    return "\n\n".join(filter(None, [*parts, step_model.section(lines, everything)])) + "\n"


def figures(lines: Sequence[Line], everything: Sequence[Line] = ()) -> dict[str, str | float | None]:
    """What one comparison comes to, for machines to read; None where something was not measured."""
    conditions = of_kind(lines, "conditions")[0]
    ours = {row.phase: row for row in rows(lines) if row.side == "ours"}
    model, measured = step_model.build(lines, everything), step_model.measured_step_s(lines)
    found: dict[str, str | float | None] = {key: conditions[key] for key in ("model_filename", "label", "date", "gpu")}
    for phase in PHASES:
        found[f"{phase}_over_stock"] = speedup(lines, phase)
        found[f"{phase}_over_ceiling"] = ours[phase].over_ceiling if phase in ours else None
        found[f"{phase}_hit_rate"] = ours[phase].hit_rate if phase in ours else None
    found["step_model_over_measured"] = model.step().total_s / measured[0] if model and measured else None
    found["same_tokens"] = agreement(lines).get("ours")
    return found


def write_report(lines: Sequence[Line], folder: Path) -> None:
    """report.md and figures.json with all comparisons, and charts if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for group in comparisons(lines).values():
        text = markdown(group, lines)
        if text and charts.available():
            written = charts.draw(group, lines, folder, chart_name(group))
            text += "".join(f"\n![{path.stem}]({path.name})" for path in written) + "\n"
        texts.append(text)
    if not charts.available():
        print("no charts: pip install matplotlib", file=sys.stderr)
    compared = [figures(group, lines) for group in comparisons(lines).values() if of_kind(group, "conditions")]
    (folder / "figures.json").write_text(json.dumps(compared, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text("\n".join(texts), encoding="utf-8")


def chart_name(lines: Sequence[Line]) -> str:
    conditions = of_kind(lines, "conditions")[0]
    return f"{Path(conditions['model_filename']).stem}-{conditions['label']}"


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for report.md and charts.")
def main(results: Path, out: Path | None) -> None:
    lines = read_lines(results)
    print("\n".join(markdown(group, lines) for group in comparisons(lines).values()))
    if out is not None:
        write_report(lines, out)


if __name__ == "__main__":
    main()
