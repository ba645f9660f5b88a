"""Tables of what each policy would have done with recorded runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from ..errors import UsageError
from ..policy import make_policy
from ..printable import printable
from ..replay.as_recorded import check_live
from ..replay.charts import draw_hit_rates
from ..replay.policies import BOUNDS, REPLAY_POLICIES
from ..replay.rows import Row, replay_all
from ..replay.tables import ranking, table
from ..system.output_file import write_output
from ..trace.trace import Trace
from ..values.sizes import parse_size
from .heat import is_picture

DEFAULT_BUDGETS = "0.5%,1%,2%,4%,8%,14%,25%,50%"


class Recorded(NamedTuple):
    """A trace, its name and its group: a ranking gives each group the same weight."""

    name: str
    group: str
    trace: Trace


def trace_names(paths: Sequence[Path]) -> list[str]:
    """A name for each trace, without the endings; those that would have the same one are numbered."""
    stems = [path.name.removesuffix(".xz").removesuffix(".trace") for path in paths]
    return [f"{stem} ({i})" if stems.count(stem) > 1 else stem for i, stem in enumerate(stems, 1)]


def compare_policies(
    traces: Iterable[Recorded],
    policies: Sequence[str] = (),
    budgets: str = DEFAULT_BUDGETS,
    out: Path | None = None,
    *,
    ram: str = "0",
) -> None:
    """Print for each trace whether a replay as recorded gives the counters of the run, and a table of hit rates.

    ``ram``: host memory beside each budget. ``policies``: names, all if empty. ``out``: a folder for results.jsonl and an SVG for each trace.
    Raises :class:`ExpertPackError`, OSError.
    """
    names = [*(dict.fromkeys(policies) or sorted(REPLAY_POLICIES)), *BOUNDS]
    sizes = list(dict.fromkeys(budgets.split(",")))
    for policy in policies:
        make_policy(policy, REPLAY_POLICIES)
    for size in sizes:
        parse_size(size, 0, "the budget")
    parse_size(ram, 0, "--ram")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for name, group, trace in traces:
        found = replay_all(trace, name, group, names, sizes, len(os.sched_getaffinity(0)), ram=ram)
        if not found:
            raise UsageError(
                f"{trace.path}: none of the budgets {budgets} holds a token's experts of a layer: give larger ones"
            )
        click.echo(f"\n### {printable(name)}\n\n{_facts(trace)}; {check_live(trace)}.\n\n{table(found)}")
        rows += found
        if out is not None and found:
            write_output(out / f"{name}.svg", draw_hit_rates(found), is_picture, "a picture")
    click.echo(f"\n### All\n\n{ranking(rows)}")
    if out is not None:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        write_output(out / "results.jsonl", lines.encode(), _is_results, "results of replays")


def _facts(trace: Trace) -> str:
    n_experts = sum(layer.n_expert for layer in trace.layers)
    acquires = trace.only_acquires()
    prefill = int((acquires.number > trace.top_k).sum())
    return (
        f"{len(acquires.layer)} acquires ({prefill} of them for several tokens) of {len(trace.layers)} layers, "
        f"{n_experts} experts, top {trace.top_k}, {len(acquires.ids)} lookups"
    )


def _is_results(head: bytes) -> bool:
    return head.startswith(b'{"trace": ')
