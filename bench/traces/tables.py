"""Prints the tables of docs/POLICY.md.

python -m bench.traces.tables [--out FOLDER]      # FOLDER: results.jsonl, and the pictures of docs/policy
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from bench.traces.synthetic import PRESETS, synthetic_trace
from llama_expert_pack.pypack.command.replay import Recorded, compare_policies
from llama_expert_pack.pypack.errors import ExpertPackError
from llama_expert_pack.pypack.trace.trace import read_trace

STORED = Path(__file__).parents[1] / "data" / "traces"
GROUPS = {
    "sample": "trained",
    "gpt-oss-120b": "published",
    "gemma-4-26b": "published",
    "qwen3moe": "random weights",
    "dsv4": "random weights",
    "k3": "random weights",
}


def all_traces() -> Iterator[Recorded]:
    for name, group in GROUPS.items():
        yield Recorded(name, group, read_trace(STORED / f"{name}.trace.xz"))
    for name, habits in PRESETS.items():
        yield Recorded(name, "made up", synthetic_trace(habits))


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.option("--out", type=click.Path(path_type=Path), help="A folder for results.jsonl and one SVG a trace.")
def main(out: Path | None) -> None:
    try:
        compare_policies(all_traces(), out=out)
    except (ExpertPackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
