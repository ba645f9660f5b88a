"""``python -m bench.demo``, as a person runs it, on models of theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab.stock import ROOT, STOCK_LIB, environment
from lab.variants import VARIANTS


def demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.demo", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment(stock=False), capture_output=True, text=True, check=False)


def test_a_model_runs_from_its_pack_as_in_stock(tmp_path: Path) -> None:
    model = VARIANTS["many-experts"](tmp_path)
    run = demo("--model", model, "--tokens", 12)
    assert run.returncode == 0, run.stderr
    pack = tmp_path / "many-experts.expert-pack"
    assert pack.exists()
    for expected in (
        f"model    {model}\n",
        f"pack     {pack}: 1280 experts of 2 layers, ",
        "verify   every block is the model's, byte for byte",
        "cache    a quarter of the experts: hit rate ",
        "compare  tokens identical, max |logit difference| 0\n",
    ):
        assert expected in run.stdout
    again = demo("--model", model, "--tokens", 2, "--no-compare", "--cache", "1MiB")
    assert again.returncode == 0, again.stderr
    assert "found complete\n" in again.stdout
    assert "cache    1MiB: hit rate " in again.stdout
    assert "compare" not in again.stdout


@pytest.mark.parametrize("kind", ["dense", "missing", "not-a-model"])
def test_what_cannot_run_is_one_line(kind: str, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    if kind == "dense":
        subprocess.run([STOCK_LIB / "test-llama-archs", "-o", tmp_path, "-a", "gemma"], check=True, capture_output=True)
        model = tmp_path / "gemma-dense.gguf"
    elif kind == "not-a-model":
        model.write_bytes(bytes(5000))
    run = demo("--model", model)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(model) in line
    assert run.stdout == f"model    {model}\n"


def test_a_budget_that_cannot_do_is_said_and_leaves_exit_code_1(tmp_path: Path) -> None:
    run = demo("--model", VARIANTS["many-experts"](tmp_path), "--cache", "1KiB")
    assert run.returncode == 1
    assert "error: the expert cache on " in run.stderr
    assert "Traceback" not in run.stderr
