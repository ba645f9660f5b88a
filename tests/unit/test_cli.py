"""The expert-pack command: help everywhere, one line for an error, exit codes."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from llama_expert_pack import __version__
from llama_expert_pack.pypack.command.cli import cli
from llama_expert_pack.pypack.convert.convert import convert
from tests.gguf_bytes import GGUF, T, facts, moe_tensors, split, tiny_moe

STORED = Path(__file__).parents[2] / "bench" / "data" / "traces"


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def commands() -> Iterator[tuple[str, click.Command]]:
    yield "expert-pack", cli
    yield from cli.commands.items()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = [*moe_tensors(0), *moe_tensors(1), *moe_tensors(2, types=(1, 1, 0))]
    return GGUF(facts(), tensors).write(tmp_path / "model.gguf")


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_every_command_and_option_has_help(name: str, command: click.Command) -> None:
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts}"
        else:
            assert parameter.human_readable_name in command.help


def test_the_commands() -> None:
    assert set(cli.commands) == {"convert", "verify", "inspect", "heat", "replay"}


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["convert", "--help"], ["verify", "-h"], ["inspect", "-h"]])
def test_help(args: list[str]) -> None:
    result = run(*args)
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_version() -> None:
    assert run("--version").output == f"expert-pack, version {__version__}\n"


@pytest.mark.parametrize(
    "args",
    [
        ["convert", "x.gguf", "--frobnicate"],
        ["verify", "x", "--shallow"],
        ["inspect"],
        ["repack"],
        ["convert", "x.gguf", "--jobs", "0"],
        ["convert", "x.gguf", "--jobs", "many"],
        ["convert", "x.gguf", "--safety-margin-gib", "-1"],
        ["convert", "x.gguf", "--safety-margin-gib", "nan"],
    ],
)
def test_wrong_usage(args: list[str]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


def test_convert_verify_inspect(model: Path) -> None:
    pack = model.with_name("model.expert-pack")
    result = run("convert", model, "--safety-margin-gib", 0)
    assert (result.exit_code, result.stdout) == (0, f"{pack} is complete ({pack.stat().st_size} bytes)\n")
    assert pack.stat().st_size == 8192 + 8 * 32768 + 4 * 20480
    assert "convert: 100 % of 0.00 GB" in result.stderr
    again = run("convert", model)
    assert again.stdout == f"{pack} is already complete ({pack.stat().st_size} bytes)\n"
    assert "bytes hashed, made from the given model" in run("verify", pack, "--deep", "--source", model).stdout
    assert "structure checked, blocks not read" in run("verify", pack).stdout
    assert run("inspect", pack).exit_code == 0


def test_what_a_stopped_run_with_force_has_left_is_named(model: Path) -> None:
    pack = convert(model, safety_margin_bytes=0).path
    partial = pack.with_name("model.expert-pack.partial")
    partial.write_bytes(bytes(8192))
    size = pack.stat().st_size
    assert run("convert", model).stdout == (
        f"{pack} is already complete ({size} bytes); {partial} is of a run with --force that did not finish: "
        "go on with --force, or remove it with --restart\n"
    )
    assert run("convert", model, "--restart").stdout == f"{pack} is already complete ({size} bytes)\n"
    assert not partial.exists()


def test_error_is_one_line(tmp_path: Path) -> None:
    page = tmp_path / "model.gguf"
    page.write_bytes(b"<html>")
    for args in (["convert", page], ["inspect", page], ["verify", page], ["verify", tmp_path / "no.expert-pack"]):
        result = run(*args)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_paths_that_no_file_can_have(path: str) -> None:
    """Every argument and option that is a path."""
    n_paths = 0
    for name, command in cli.commands.items():
        for parameter in command.params:
            if isinstance(parameter.type, click.Path):
                given = [path] if isinstance(parameter, click.Argument) else ["x", parameter.opts[0], path]
                result = run(name, *given)
                assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
                assert "it must be the path of a file, not" in result.stderr
                n_paths += 1
    assert n_paths == 9


@pytest.mark.parametrize("path", [".", "..", "/"])
def test_heat_of_a_folder(path: str) -> None:
    result = run("heat", path)
    assert (result.exit_code, result.stderr) == (1, f"error: {path}: the trace can't be read: Is a directory\n")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError("without a number"), "error: input/output: without a number\n"),
        (FileNotFoundError(2, "No such file", "gone"), "error: gone: No such file\n"),
        (OSError(5, "Input/output error", "\x1b[2J\n"), "error: \\x1b[2J\\n: Input/output error\n"),
    ],
)
def test_any_oserror_is_one_line(error: OSError, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("llama_expert_pack.pypack.command.cli.verify", fails)
    result = run("verify", "x")
    assert (result.exit_code, result.stderr) == (1, sentence)


def test_heat_never_writes_over_its_trace_and_prints_plain_text(tmp_path: Path) -> None:
    trace = tmp_path / "t.svg"
    content = lzma.decompress((STORED / "sample.trace.xz").read_bytes())
    trace.write_bytes(content)
    for args in ([trace], [trace, "--out", trace]):
        result = run("heat", *args)
        assert result.exit_code == 1 and "is the same file as the trace" in result.stderr
    assert trace.read_bytes() == content
    other = tmp_path / "\x1b[2J\udcff.trace"
    trace.rename(other)
    result = run("heat", other)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"wrote {tmp_path}/\\x1b[2J\\xff.svg\n"


def test_installed_as_a_module(model: Path) -> None:
    """A real process: no traceback, exit code 1."""
    done = subprocess.run(
        [sys.executable, "-m", "llama_expert_pack.pypack.command.cli", "verify", str(model)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == f"error: {model} is not an expert pack: it starts with {model.read_bytes()[:8]!r}" + (
        " instead of b'LXPTPACK'\n"
    )


def test_inspect_table(model: Path) -> None:
    pack = convert(model, safety_margin_bytes=0).path
    lines = run("inspect", pack).stdout.splitlines()
    assert lines[0] == f"{pack}: expert pack of Tiny Test (test), top-2"
    assert lines[1].startswith("3 layers, 12 experts, ")
    rows = [line.split() for line in lines[4:]]
    assert [row[:5] for row in rows] == [
        ["0-1", "0-1", "exps", "4", "32768"],
        ["2", "2", "exps", "4", "20480"],
    ]
    assert "gate F16 64x32, up F16 64x32, down F32 32x64" in lines[5]


def test_inspect_says_the_same_of_model_and_pack(model: Path) -> None:
    pack = convert(model, safety_margin_bytes=0).path
    of_model = json.loads(run("inspect", model, "--json").stdout)
    of_pack = json.loads(run("inspect", pack, "--json").stdout)
    assert (of_model.pop("kind"), of_pack.pop("kind")) == ("gguf", "pack")
    assert (of_model.pop("path"), of_pack.pop("path")) == (str(model), str(pack))
    assert of_model == of_pack
    assert of_pack["n_experts"] == 12
    assert of_pack["payload_bytes"] == 8 * 32768 + 4 * 20480
    assert of_pack["expert_bytes"] == 8 * 24576 + 4 * (2 * 4096 + 8192)
    assert of_pack["layers"][2]["roles"][0]["type_name"] == "F16"


def test_inspect_shards(tmp_path: Path) -> None:
    paths = split(tiny_moe(), [4, 5], tmp_path)
    assert "2 layers, 8 experts" in run("inspect", paths[0]).stdout


def test_inspect_with_budget(model: Path) -> None:
    found = json.loads(run("inspect", model, "--json", "--budget", "300000").stdout)
    assert found["budget_bytes"] == 300_000
    pools = {(p["block_bytes"], p["n_layers"], p["n_experts"]) for p in found["pools"]}
    assert pools == {(20480, 1, 4), (32768, 2, 8)}
    used = sum(p["block_bytes"] * p["n_slots"] for p in found["pools"])
    assert 300_000 - 20480 < used <= 300_000
    assert "with a cache of" in run("inspect", model, "--budget", "100%").stdout
    assert "8 of 8 experts of 32768 bytes (100 %, 2 layers)" in run("inspect", model, "--budget", "1GiB").stdout


@pytest.mark.parametrize(
    ("budget", "sentence"), [("1", "is too small"), ("lots", "the budget must be a size"), ("9" * 5000, "out of range")]
)
def test_inspect_with_wrong_budget(budget: str, sentence: str, model: Path) -> None:
    result = run("inspect", model, "--budget", budget)
    assert result.exit_code == 1
    assert sentence in result.stderr and len(result.stderr) < 200


def test_names_that_are_no_text(model: Path, tmp_path: Path) -> None:
    """In a real process, whose output is strict UTF-8."""
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    model = model.rename(folder / "model.gguf")
    pack = model.with_suffix(".expert-pack")

    def stdout(*args: object) -> str:
        command: list[str | bytes] = [
            sys.executable,
            "-m",
            "llama_expert_pack.pypack.command.cli",
            *(os.fsencode(str(arg)) for arg in args),
        ]
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
        done = subprocess.run(command, capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    shown = f"{tmp_path}/\\xff/model"
    assert json.loads(stdout("inspect", model, "--json"))["path"] == f"{shown}.gguf"
    assert stdout("inspect", model).startswith(f"{shown}.gguf: model of")
    for _ in range(2):
        assert stdout("convert", model).startswith(f"{shown}.expert-pack is ")
    assert stdout("verify", pack).startswith(f"{shown}.expert-pack is valid")


def test_inspect_dense_model(tmp_path: Path) -> None:
    path = GGUF(facts("llama"), [T("blk.0.ffn_up.weight", (64, 32))]).write(tmp_path / "dense.gguf")
    result = run("inspect", path)
    assert result.exit_code == 1
    assert "dense model, architecture 'llama'" in result.stderr
