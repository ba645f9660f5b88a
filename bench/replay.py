"""Replays traces against every cache policy and against the best that was possible (Belady), at a range of budgets.

    python -m bench.replay TRACE... [--policy NAME]... [--budgets 5%,10%,20%] [--out FOLDER]
    python -m bench.replay --synthetic

Record a trace with Llama(..., expert_trace=PATH). For each trace: whether a replay as recorded gives the counters of
the run, then a table of hit rates. With --out also results.jsonl and an SVG of hit rate and gap to Belady over budget.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from bench.replaying.belady import Belady, BeladyBypass
from bench.replaying.cache import Counts, replay, replay_as_recorded
from bench.replaying.charts import draw_hit_rates
from bench.replaying.native import has_twin, replay_compiled
from bench.replaying.synthetic import PRESETS, synthetic_trace
from pypack.budget import parse_size
from pypack.errors import BudgetError, ExpertPackError
from pypack.policy import DEFAULT_POLICY, POLICIES, make_policy
from pypack.trace import Trace, read_trace

BELADY, BYPASS = "belady", "belady-bypass"
DEFAULT_BUDGETS = "1%,2%,4%,8%,14%,25%,40%,60%"

Row = dict[str, Any]


def run(trace: Trace, policy_name: str, budget_bytes: int) -> Counts:
    """One replay. Raises :class:`BudgetError` if the budget is below a working set."""
    pools = trace.pools(budget_bytes)
    if policy_name in (BELADY, BYPASS):
        policy: Any = (BeladyBypass if policy_name == BYPASS else Belady)(trace.n_keys)
    else:
        policy = make_policy(policy_name)
    compiled = has_twin(trace, pools, policy)
    return replay_compiled(trace, pools, policy) if compiled else replay(trace, pools, policy)


def replay_all(trace: Trace, name: str, policies: Sequence[str], budgets: Sequence[str]) -> list[Row]:
    """A row for each policy and each budget that holds a working set, in this order."""
    trace = trace.only_acquires()
    n_per_token = sum(min(trace.top_k, layer.n_expert) for layer in trace.layers)
    n_experts = sum(layer.n_expert for layer in trace.layers)

    def row(job: tuple[str, str]) -> Row | None:
        policy, budget = job
        budget_bytes = parse_size(budget, trace.payload_bytes)
        start = time.perf_counter()
        try:
            counts = run(trace, policy, budget_bytes)
        except BudgetError:
            return None
        share = budget_bytes / trace.payload_bytes
        return {
            "trace": name, "policy": policy, "budget": budget, "share": share,
            "holds_tokens": share * n_experts / n_per_token, "acquires": counts.acquires, "hits": counts.hits,
            "misses": counts.misses, "evictions": counts.evictions, "hit_rate": counts.hit_rate,
            "decode_hit_rate": counts.decode_hit_rate, "seconds": time.perf_counter() - start,
        }  # fmt: skip

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        rows = threads.map(row, [(policy, budget) for policy in policies for budget in budgets])
        return [found for found in rows if found is not None]


def table(rows: Iterable[Row]) -> str:
    """Markdown: a policy a line, a budget a column, the best policy of each budget in bold."""
    rows = list(rows)
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    rate = {(row["policy"], row["budget"]): row["hit_rate"] for row in rows}
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    holds = {row["budget"]: row["holds_tokens"] for row in rows}
    real = [policy for policy in policies if policy not in (BELADY, BYPASS)]
    best = {budget: max((rate[policy, budget] for policy in real), default=1.0) for budget in budgets}
    lines = [
        "| cache | " + " | ".join(budgets) + " |",
        "|---|" + "---|" * len(budgets),
        "| in tokens' experts | " + " | ".join(f"{holds[budget]:.1f}" for budget in budgets) + " |",
    ]
    for policy in policies:
        cells = [
            f"**{rate[policy, b]:.3f}**" if policy in real and rate[policy, b] == best[b] else f"{rate[policy, b]:.3f}"
            for b in budgets
        ]
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ranking(rows: Iterable[Row]) -> str:
    """Markdown: policies by the mean, over traces and budgets, of their hits over Belady's (with bypass)."""
    best = {}
    rows = list(rows)
    for row in rows:
        if row["policy"] == BYPASS:
            best[row["trace"], row["budget"]] = row["hits"]
    shares: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        shares[row["policy"]].append(row["hits"] / max(1, best[row["trace"], row["budget"]]))
        rates[row["policy"]].append(row["hit_rate"])
    mean = {policy: sum(found) / len(found) for policy, found in shares.items()}
    mean_rate = {policy: sum(found) / len(found) for policy, found in rates.items()}
    lines = ["| policy | share of the possible hits, mean | worst | hit rate, mean |", "|---|---|---|---|"]
    for policy in sorted(mean, key=lambda name: -mean[name]):
        lines.append(f"| {policy} | {mean[policy]:.3f} | {min(shares[policy]):.3f} | {mean_rate[policy]:.3f} |")
    return "\n".join(lines)


def check_live(trace: Trace) -> str:
    """Whether the replay of the run as it was gives its counters; one line."""
    if trace.end is None or trace.policy not in POLICIES:
        return "no live counters to compare with"
    counts = replay_as_recorded(trace, make_policy(trace.policy))
    found = (counts.acquires, counts.hits, counts.misses, counts.evictions)
    if found != trace.end[:4]:
        raise ExpertPackError(
            f"{trace.path}: the replay with {trace.policy} counts {found}, the run counted {tuple(trace.end[:4])} "
            "(acquires, hits, misses, evictions): trace and package are of different versions"
        )
    return f"the replay with {trace.policy} gives the run's counters: {counts.hits} hits, {counts.misses} misses, {counts.evictions} evictions"


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.argument("traces", nargs=-1, type=click.Path(path_type=Path))
@click.option("--policy", "policies", multiple=True, help="Only this policy; may be repeated. Default: all.")
@click.option("--budgets", default=DEFAULT_BUDGETS, show_default=True, help="Sizes, or shares of all experts.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder for results.jsonl and one SVG a trace.")
@click.option("--synthetic", is_flag=True, help="Add the made-up traces of bench/replaying/synthetic.py.")
@click.option("--allow-cut", is_flag=True, help="Take traces that were not ended.")
def main(
    traces: tuple[Path, ...],
    policies: tuple[str, ...],
    budgets: str,
    out: Path | None,
    synthetic: bool,
    allow_cut: bool,
) -> None:
    try:
        for policy in policies:
            make_policy(policy)
        if not traces and not synthetic:
            raise click.UsageError("give traces, or --synthetic")
        names = [*(policies or POLICIES), BELADY, BYPASS]
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        rows: list[Row] = []
        for name, trace in _load(traces, synthetic, allow_cut):
            found = replay_all(trace, name, names, budgets.split(","))
            print(f"\n### {name}\n\n{_facts(trace)}; {check_live(trace)}.\n\n{table(found)}")
            rows += found
            if out is not None and found:
                draw_hit_rates(found, out / f"{name}.svg", default=DEFAULT_POLICY)
        print(f"\n### All\n\n{ranking(rows)}")
        if out is not None:
            (out / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    except (ExpertPackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _load(paths: Sequence[Path], synthetic: bool, allow_cut: bool) -> Iterable[tuple[str, Trace]]:
    for path in paths:
        yield path.stem, read_trace(path, allow_cut=allow_cut)
    if synthetic:
        for name, habits in PRESETS.items():
            yield name, synthetic_trace(habits)


def _facts(trace: Trace) -> str:
    n_experts = sum(layer.n_expert for layer in trace.layers)
    acquires = trace.only_acquires()
    prefill = int((acquires.number > trace.top_k).sum())
    return (
        f"{len(acquires.layer)} acquires ({prefill} of them for several tokens) of {len(trace.layers)} layers, "
        f"{n_experts} experts, top {trace.top_k}, {len(acquires.ids)} lookups"
    )


if __name__ == "__main__":
    main()
