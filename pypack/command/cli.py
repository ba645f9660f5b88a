"""The ``expert-pack`` command."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import click

from .._version import __version__
from ..convert.convert import DEFAULT_SAFETY_MARGIN_BYTES, convert
from ..convert.verify import verify
from ..convert.workers import DEFAULT_JOBS, MAX_JOBS
from ..errors import ExpertPackError
from ..printable import printable
from ..trace.trace import read_trace
from ..values.checks import check_path
from .heat import draw_heat
from .inspect import describe, format_table, to_json
from .progress import for_stderr
from .replay import DEFAULT_BUDGETS, Recorded, compare_policies, trace_names

_GIB = 1 << 30


class _Path(click.Path):
    """A path that a file can have."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            check_path("it", value)
        except ExpertPackError as error:
            self.fail(f"{error}.", param, ctx)
        return super().convert(value, param, ctx)


_PATH = _Path(path_type=Path)


class _Group(click.Group):
    """Turns domain errors and Ctrl-C into one line and an exit code, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ExpertPackError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)
        except OSError as error:
            click.echo(printable(f"error: {error.filename or 'input/output'}: {error.strerror or error}"), err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted: a conversion goes on when the same command is run again", err=True)
            ctx.exit(130)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="expert-pack")
def cli() -> None:
    """Expert packs: the routed experts of a GGUF, laid out to be read from an SSD one block at a time."""


def _refuse_nan(_: click.Context, __: click.Parameter, value: float) -> float:
    if math.isnan(value):  # compares as neither below nor above any limit
        raise click.BadParameter("nan is not a number.")
    return value


@cli.command("convert")
@click.argument("model", type=_PATH)
@click.option(
    "--output",
    type=_PATH,
    help="The pack to write (ending in .expert-pack), or a folder for it. Default: beside the model.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, MAX_JOBS),
    help=f"Threads that read, hash and write at the same time. Default: as many as memory allows, up to {DEFAULT_JOBS}.",
)
@click.option(
    "--safety-margin-gib",
    type=click.FloatRange(min=0, max=1e6),
    callback=_refuse_nan,
    default=DEFAULT_SAFETY_MARGIN_BYTES / _GIB,
    show_default=True,
    help="Free space in GiB that must remain on the disk.",
)
@click.option("--force", is_flag=True, help="Replace a pack that is already there.")
@click.option("--restart", is_flag=True, help="Throw away what an interrupted conversion has written.")
def convert_command(
    model: Path, output: Path | None, jobs: int | None, safety_margin_gib: float, force: bool, restart: bool
) -> None:
    """Make the expert pack of MODEL, a .gguf file or the first shard of a split one.

    A conversion that was stopped goes on where it was when the same command is run again.
    """
    result = convert(
        model,
        output,
        jobs=jobs,
        safety_margin_bytes=int(safety_margin_gib * _GIB),
        force=force,
        restart=restart,
        progress=for_stderr("convert"),
    )
    if result.reused:
        leftover = result.leftover
        rest = f"; {leftover} is of a run with --force that did not finish: go on with --force, or remove it with --restart"
        click.echo(
            printable(f"{result.path} is already complete ({result.pack_bytes} bytes){rest if leftover else ''}")
        )
    else:
        resumed = f", {result.resumed_layers} layers were there already" if result.resumed_layers else ""
        click.echo(printable(f"{result.path} is complete ({result.pack_bytes} bytes{resumed})"))


@cli.command("verify")
@click.argument("pack", type=_PATH)
@click.option("--deep", is_flag=True, help="Also read every block and check its hash.")
@click.option(
    "--source",
    type=_PATH,
    help="Also check that the pack belongs to this model; with --deep, compare every byte with it.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, MAX_JOBS),
    help=f"Threads that read and hash at the same time. Default: as many as memory allows, up to {DEFAULT_JOBS}.",
)
def verify_command(pack: Path, deep: bool, source: Path | None, jobs: int | None) -> None:
    """Check the expert pack PACK: header, index, manifest and size; its blocks with --deep."""
    result = verify(pack, deep=deep, source=source, jobs=jobs, progress=for_stderr("verify"))
    click.echo(printable(f"{pack} is valid: {result}"))


@cli.command("inspect")
@click.argument("path", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--budget", help='Cache size to predict the slots for: "20GiB", or "60%" of all experts.')
def inspect_command(path: Path, as_json: bool, budget: str | None) -> None:
    """Show the layers, roles, types and sizes of PATH, an expert pack or a model (.gguf)."""
    description = describe(path, budget)
    click.echo(to_json(description) if as_json else format_table(description))


@cli.command("heat")
@click.argument("trace", type=_PATH)
@click.option("--out", type=_PATH, help="The .png or .svg to write. Default: beside TRACE, .svg.")
@click.option("--ranked", is_flag=True, help="Each layer's experts from the most to the least used.")
@click.option("--allow-cut", is_flag=True, help="Take what is there of a trace that was not ended.")
def heat_command(trace: Path, out: Path | None, ranked: bool, allow_cut: bool) -> None:
    """Draw which experts the run recorded in TRACE used: a row a layer, a column an expert."""
    found = read_trace(trace, allow_cut=allow_cut)  # first: a folder may have no name to put .svg behind
    path = out or trace.with_suffix(".svg")
    draw_heat(found, path, ranked=ranked)
    click.echo(printable(f"wrote {path}"))


@cli.command("replay")
@click.argument("traces", nargs=-1, required=True, type=_PATH)
@click.option("--policy", "policies", multiple=True, help="Only this policy; may be repeated. Default: all.")
@click.option("--budgets", default=DEFAULT_BUDGETS, show_default=True, help="Sizes, or shares of all experts.")
@click.option("--out", type=_PATH, help="A folder for results.jsonl and one SVG a trace.")
@click.option("--allow-cut", is_flag=True, help="Take what is there of traces that were not ended.")
def replay_command(
    traces: tuple[Path, ...], policies: tuple[str, ...], budgets: str, out: Path | None, allow_cut: bool
) -> None:
    """Compare cache policies, and the best that was possible, on the runs recorded in TRACES at a range of budgets."""
    named = zip(trace_names(traces), traces, strict=True)
    recorded = (Recorded(name, "given", read_trace(path, allow_cut=allow_cut)) for name, path in named)
    compare_policies(recorded, policies, budgets, out)


def main(args: list[str] | None = None) -> None:
    """Runs the command and exits: 0 when all is well, 1 on a domain error, 2 on wrong usage, 130 on Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may have letters that the terminal has not
    cli.main(args, prog_name="expert-pack")


if __name__ == "__main__":
    main()
