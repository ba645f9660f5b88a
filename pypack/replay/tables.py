"""Rows of replays as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .policies import BOUNDS, BYPASS
from .rows import Row


def table(rows: Iterable[Row]) -> str:
    """A policy a line, a budget a column, the best policy of each budget in bold; in brackets hits in host memory."""
    rows = list(rows)
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    rate = {(row["policy"], row["budget"]): row["hit_rate"] for row in rows}
    in_host = {(row["policy"], row["budget"]): row["host_hit_rate"] for row in rows if row.get("host_bytes")}
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    holds = {row["budget"]: row["holds_tokens"] for row in rows}
    real = [policy for policy in policies if policy not in BOUNDS]
    best = {budget: max((rate[policy, budget] for policy in real), default=1.0) for budget in budgets}
    lines = [
        "| cache | " + " | ".join(budgets) + " |",
        "|---|" + "---|" * len(budgets),
        "| in tokens' experts | " + " | ".join(f"{holds[budget]:.1f}" for budget in budgets) + " |",
    ]
    for policy in policies:
        cells = [
            (
                f"**{rate[policy, b]:.3f}**"
                if policy in real and rate[policy, b] == best[b]
                else f"{rate[policy, b]:.3f}"
            )
            + (f" ({in_host[policy, b]:.3f})" if in_host and policy != BYPASS else "")  # whose slots have no places
            for b in budgets
        ]
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ranking(rows: Sequence[Row]) -> str:
    """Policies by their mean share of the hits that Belady (with bypass) has.

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
