"""Upstream's own server tests against stock's llama-server, ours, and ours with a packed model.

    python -m bench.serving.suite [--launcher stock|ours|packed]... [--fast] [--out FILE.json]

The tests are the pinned source's, unchanged; the models that they would download are made here (bench/serving/models.py),
so tests that expect a certain story fail with every launcher. What counts: what passes with stock passes with the
others. `packed` runs with a quarter of the experts in memory. A test that fails is run once more.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

from bench.serving.launchers import KINDS, write_script
from bench.serving.models import write_models
from bench.serving.outcomes import VARIABLE
from bench.serving.process import free_port
from lab.stock import ROOT, STOCK_LIB

SOURCE = STOCK_LIB.parent / "source"
WORK = ROOT / "build" / "server_suite"
MODULES = ROOT / "bench" / "serving" / "modules"  # in place of packages that the tests import
RESULTS = ROOT / "bench" / "results" / "server_suite.json"
# What a pack could change, and no waiting for models to fall asleep or clients to give up.
FAST_FILES = (
    "test_basic.py",
    "test_completion.py",
    "test_ctx_shift.py",
    "test_embedding.py",
    "test_infill.py",
    "test_kv_keep_only_active.py",
    "test_metrics.py",
    "test_rerank.py",
    "test_router.py",
    "test_slot_save.py",
    "test_speculative.py",
    "test_stream.py",
    "test_template.py",
    "test_tokenize.py",
)
TEST_TIMEOUT_S = 120

Outcomes = dict[str, list[str]]


@dataclass(frozen=True)
class Workspace:
    """A copy of the tests beside the parts of the source that they read, and the models."""

    tests: Path
    model_cache: Path
    quarter_bytes: int


def prepare(work: Path = WORK, source: Path = SOURCE) -> Workspace:
    """Lays the workspace anew. FileNotFoundError if the source is not there."""
    tests = work / "tools" / "server" / "tests"
    if not (source / "tools" / "server" / "tests").is_dir():
        raise FileNotFoundError(f"{source}: llama.cpp's source is not there: run `make stock`")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source / "tools" / "server" / "tests", tests)
    for read in ("models", "tools/mtmd"):
        (work / read).symlink_to(source / read)
    cache = work / "cache"
    return Workspace(tests, cache, write_models(cache, tests / "tmp", source))


def _environment(workspace: Workspace, script: Path, outcomes: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(MODULES), os.environ.get("PYTHONPATH")))),
        "LLAMA_SERVER_BIN_PATH": str(script),
        "LLAMA_CACHE": str(workspace.model_cache),
        "HF_ENDPOINT": "http://127.0.0.1:1/",  # nobody listens: whatever is not in the cache fails at once
        "PORT": str(free_port()),
        "LLAMA_ARG_THREADS": "1",  # several servers share the machine, and idle threads spin
        VARIABLE: str(outcomes),
    }


def run_tests(workspace: Workspace, script: Path, tests: Sequence[str], log: Path) -> dict[str, str]:
    """Runs files or ids of tests in one pytest; outcome by id. RuntimeError if pytest itself fails."""
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = Path(scratch) / "outcomes.jsonl"
        command = [sys.executable, "-m", "pytest", "-p", "bench.serving.outcomes", "-m", "not slow"]
        command += ["--timeout", str(TEST_TIMEOUT_S), "-p", "no:cacheprovider", "-q", *tests]
        with log.open("a") as output:
            environment = _environment(workspace, script, outcomes)
            done = subprocess.run(
                command, cwd=workspace.tests, env=environment, stdout=output, stderr=output, check=False
            )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {done.returncode}: see {log}")
        lines = outcomes.read_text().splitlines() if outcomes.exists() else []
        return {test["id"]: test["outcome"] for test in map(json.loads, lines)}


def _shards(tests: Path, files: Iterable[str], n: int) -> list[list[str]]:
    """Files in `n` groups of about equally many tests."""
    weights = {file: (tests / "unit" / file).read_text().count("server.start(") for file in files}
    groups: list[list[str]] = [[] for _ in range(n)]
    for file in sorted(weights, key=weights.__getitem__, reverse=True):
        smallest = min(groups, key=lambda group: sum(weights[Path(name).name] for name in group))
        smallest.append(f"unit/{file}")
    return [group for group in groups if group]


def run_launcher(
    workspace: Workspace, kind: str, files: Iterable[str], n_jobs: int, stock: Outcomes | None = None
) -> Outcomes:
    """All tests of the files with one launcher: {"passed": ids, "failed": ids, "skipped": ids}.

    Those that fail are run once more; given stock's outcomes, only those that pass with stock.
    """
    work = workspace.model_cache.parent
    pack = {"LLAMA_ARG_EXPERT_PACK": "auto", "LLAMA_ARG_EXPERT_CACHE": str(workspace.quarter_bytes)}
    script = write_script(work, kind, pack, without_pack="jina-reranker")
    shards = _shards(workspace.tests, files, n_jobs)
    logs = [work / f"{kind}-{i}.log" for i in range(len(shards))]
    with ThreadPoolExecutor(n_jobs) as pool:
        parts = list(pool.map(lambda shard, log: run_tests(workspace, script, shard, log), shards, logs))
    found = {test: outcome for part in parts for test, outcome in part.items()}
    failed = [test for test, outcome in found.items() if outcome == "failed" and (not stock or test in stock["passed"])]
    if failed:
        found |= run_tests(workspace, script, failed, work / f"{kind}-again.log")
    return {
        name: sorted(test for test, outcome in found.items() if outcome == name)
        for name in ("passed", "failed", "skipped")
    }


def lost(results: dict[str, Outcomes]) -> dict[str, list[str]]:
    """By launcher, the tests that pass with stock and not with it."""
    passed = set(results["stock"]["passed"])
    return {kind: sorted(passed - set(found["passed"])) for kind, found in results.items() if kind != "stock"}


def table(results: dict[str, Outcomes]) -> str:
    """Markdown: passed / failed / skipped by file and launcher."""

    def file_of(test: str) -> str:
        return test.split("::")[0].removeprefix("unit/")

    kinds = [kind for kind in KINDS if kind in results]
    files = sorted({file_of(test) for found in results.values() for tests in found.values() for test in tests})
    lines = [f"| file | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for file in [*files, None]:
        cells = [
            " / ".join(
                str(sum(file in (None, file_of(test)) for test in results[kind][name]))
                for name in ("passed", "failed", "skipped")
            )
            for kind in kinds
        ]
        lines.append(f"| {file or 'all'} | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.option("--launcher", "kinds", type=click.Choice(KINDS), multiple=True, help="Repeatable; default: all three.")
@click.option("--fast", is_flag=True, help="Only the files that take seconds.")
@click.option("--file", "only", multiple=True, help="Only this file of tests/unit. Repeatable.")
@click.option("--jobs", "n_jobs", default=os.cpu_count() or 1, show_default=True, help="Servers at the same time.")
@click.option("--work", type=click.Path(path_type=Path), default=WORK, show_default=True, help="Laid anew.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True, help="JSON to update.")
def main(kinds: tuple[str, ...], fast: bool, only: tuple[str, ...], n_jobs: int, work: Path, out: Path) -> None:
    try:
        workspace = prepare(work)
        files = only or (
            FAST_FILES if fast else sorted(path.name for path in (workspace.tests / "unit").glob("test_*.py"))
        )
        results: dict[str, Outcomes] = json.loads(out.read_text()) if out.exists() else {}
        for kind in kinds or KINDS:
            results[kind] = run_launcher(
                workspace, kind, files, n_jobs, results.get("stock") if kind != "stock" else None
            )
            out.write_text(json.dumps(results, indent=1) + "\n")
    except (FileNotFoundError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(table(results))
    if "stock" in results:
        for kind, tests in lost(results).items():
            click.echo(f"{kind}: {len(tests)} tests pass with stock only" + "".join(f"\n  {test}" for test in tests))
        if any(lost(results).values()):
            sys.exit(1)


if __name__ == "__main__":
    main()
