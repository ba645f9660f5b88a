"""Replays traces against every cache policy and against the best that was possible (Belady), at a range of budgets.

    python -m bench.replay [TRACE...] [--policy NAME]... [--budgets 5%,10%,20%] [--out FOLDER]

Record a trace with Llama(..., expert_trace=PATH). Without one: those of docs/POLICY.md. For each trace: whether a
replay as recorded gives the counters of the run, then a table of hit rates. With --out also results.jsonl and an SVG
of hit rate and gap to Belady over budget.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
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
from llama_expert_pack.pypack.command.heat import is_picture
from llama_expert_pack.pypack.errors import BudgetError, ExpertPackError
from llama_expert_pack.pypack.policy.registry import DEFAULT_POLICY, POLICIES, make_policy
from llama_expert_pack.pypack.printable import printable
from llama_expert_pack.pypack.system.output_file import write_output
from llama_expert_pack.pypack.trace.trace import Trace, read_trace
from llama_expert_pack.pypack.values.sizes import parse_size

BELADY, BYPASS = "belady", "belady-bypass"
DEFAULT_BUDGETS = "0.5%,1%,2%,4%,8%,14%,25%,50%"
STORED = Path(__file__).parent / "data" / "traces"
STORED_GROUPS = {"sample": "trained", "qwen3moe": "random weights", "dsv4": "random weights", "k3": "random weights"}

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


def replay_all(trace: Trace, name: str, group: str, policies: Sequence[str], budgets: Sequence[str]) -> list[Row]:
    """A row for each policy and each budget that holds a working set, in this order."""
    trace = trace.only_acquires()
    n_per_token = sum(min(trace.top_k, layer.n_expert) for layer in trace.layers)
    n_experts = sum(layer.n_expert for layer in trace.layers)

    def row(job: tuple[str, str]) -> Row | None:
        policy, budget = job
        budget_bytes = parse_size(budget, trace.payload_bytes)
        start = time.thread_time()
        try:
            counts = run(trace, policy, budget_bytes)
        except BudgetError:
            return None
        share = budget_bytes / trace.payload_bytes
        return {
            "trace": name, "group": group, "policy": policy, "budget": budget, "share": share,
            "holds_tokens": share * n_experts / n_per_token, "acquires": counts.acquires, "hits": counts.hits,
            "misses": counts.misses, "evictions": counts.evictions, "hit_rate": counts.hit_rate,
            "decode_hit_rate": counts.decode_hit_rate, "cpu_s": time.thread_time() - start,
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


def ranking(rows: Sequence[Row]) -> str:
    """Markdown: policies by their mean share of the hits that Belady (with bypass) has.

    Groups count the same, in a group its traces, of a trace its budgets. Last: what the replays took.
    """
    best = {(row["trace"], row["budget"]): row["hits"] for row in rows if row["policy"] == BYPASS}
    n_budgets = Counter(trace for trace, _ in best)
    group_of = {row["trace"]: row["group"] for row in rows}
    n_traces = Counter(group_of.values())
    found: list[tuple[float, str]] = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        shares, rates = dict.fromkeys(n_traces, 0.0), 0.0
        mine = [row for row in rows if row["policy"] == policy]
        for row in mine:
            weight = 1 / n_budgets[row["trace"]] / n_traces[row["group"]]
            shares[row["group"]] += weight * row["hits"] / max(1, best[row["trace"], row["budget"]])
            rates += weight * row["hit_rate"] / len(n_traces)
        mean = sum(shares.values()) / len(shares)
        cpu_s = 1e6 * sum(row["cpu_s"] for row in mine) / max(1, sum(row["acquires"] for row in mine))
        cells = [f"{mean:.3f}", *(f"{share:.3f}" for share in shares.values()), f"{rates:.3f}", f"{cpu_s:.1f}"]
        found.append((mean, f"| {policy} | {' | '.join(cells)} |"))
    titles = ["policy", "share of the possible hits", *n_traces, "hit rate", "CPU s per million acquires"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join(lines + [line for _, line in sorted(found, reverse=True)])


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
@click.option("--allow-cut", is_flag=True, help="Take traces that were not ended.")
def main(
    traces: tuple[Path, ...],
    policies: tuple[str, ...],
    budgets: str,
    out: Path | None,
    allow_cut: bool,
) -> None:
    try:
        for policy in policies:
            make_policy(policy)
        names = [*(policies or POLICIES), BELADY, BYPASS]
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        rows: list[Row] = []
        for name, group, trace in _load(traces, allow_cut):
            found = replay_all(trace, name, group, names, budgets.split(","))
            print(f"\n### {printable(name)}\n\n{_facts(trace)}; {check_live(trace)}.\n\n{table(found)}")
            rows += found
            if out is not None and found:
                chart = draw_hit_rates(found, default=DEFAULT_POLICY)
                write_output(out / f"{name}.svg", chart, is_picture, "a picture")
        print(f"\n### All\n\n{ranking(rows)}")
        if out is not None:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            write_output(out / "results.jsonl", lines.encode(), _is_results, "results of replays")
    except (ExpertPackError, OSError) as error:
        print(f"error: {printable(_sentence(error))}", file=sys.stderr)
        sys.exit(1)


def _sentence(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


def _is_results(head: bytes) -> bool:
    return head.startswith(b'{"trace": ')


def _load(paths: Sequence[Path], allow_cut: bool) -> Iterable[tuple[str, str, Trace]]:
    """Name, group and trace."""
    for path in paths:
        yield path.name.split(".")[0], "given", read_trace(path, allow_cut=allow_cut)
    if not paths:
        for name, group in STORED_GROUPS.items():
            yield name, group, read_trace(STORED / f"{name}.trace.xz")
        for name, habits in PRESETS.items():
            yield name, "made up", synthetic_trace(habits)


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
