"""Names from files reach the terminal as text only, in one line, whatever they hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_expert_pack import describe, find_pack, open_pack
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.errors import ExpertPackError, ReadError, UsageError
from llama_expert_pack.pypack.gguf.model import read_model
from llama_expert_pack.pypack.printable import printable
from llama_expert_pack.pypack.source.match import check_source
from tests.gguf_bytes import GGUF, STRING, T, facts, kv, moe_tensors, split, text, tiny_moe
from tests.pack_tools import resign

EVIL = "\x1b]0;owned\x07\x9b31m\u202eabc\n\r\x85\u2028\x7f"


def run(*args: object) -> subprocess.CompletedProcess[bytes]:
    """A real process: what it writes, byte by byte."""
    return subprocess.run(
        [sys.executable, "-m", "llama_expert_pack.pypack.command.cli", *map(str, args)], capture_output=True
    )


def assert_harmless(output: bytes) -> None:
    for line in output.decode("utf-8").splitlines():
        assert line.isprintable(), line
    assert not any(char in output.decode() for char in EVIL if not char.isprintable() and char != "\n")


def named(name: str, architecture: str = "test") -> GGUF:
    kvs = [text("general.architecture", architecture), text("general.name", name), *facts()[2:]]
    return GGUF(kvs, moe_tensors(0))


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_inspect(as_json: list[str], tmp_path: Path) -> None:
    model = named(EVIL, EVIL).write(tmp_path / "model.gguf")
    pack = convert(model, safety_margin_bytes=0).path
    for path in (model, pack):
        done = run("inspect", path, *as_json)
        assert done.returncode == 0
        assert_harmless(done.stdout)
        if as_json:
            assert json.loads(done.stdout)["model"]["name"] == EVIL
        else:
            assert rb"\x1b]0;owned\x07\x9b31m\u202eabc" in done.stdout.splitlines()[0]


def test_names_that_cannot_be_written_in_the_terminals_encoding(tmp_path: Path) -> None:
    model = named("Modèle 模型").write(tmp_path / "model.gguf")
    script = "import sys; from llama_expert_pack.pypack.command.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-X", "utf8=0", "-c", script, "inspect", str(model)]
    done = subprocess.run(command, capture_output=True, env={"PYTHONIOENCODING": "latin-1:strict"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Mod\xe8le \\u6a21\\u578b" in done.stdout


def messages(path: Path, pack: Path) -> list[str]:
    """Of everything that opens a model or a pack."""
    found = []
    for call in (
        lambda: convert(path, safety_margin_bytes=0),
        lambda: describe(path),
        lambda: open_pack(pack),
        lambda: check_source(open_pack(pack), path),
        lambda: verify(pack, source=path),
    ):
        try:
            call()
        except ExpertPackError as error:
            found.append(str(error))
    return found


EVIL_MODELS = {
    "tensor": GGUF(facts(), [T(EVIL, (32,), 999, data=bytes(32))]),
    "tensors": GGUF(facts(), [T(EVIL, (32,)), T(EVIL, (32,))]),
    "key": GGUF([*facts(), text(EVIL, "a"), text(EVIL, "b")], moe_tensors(0)),
    "architecture": GGUF([text("general.architecture", EVIL)], [T("a", (32,))]),
    "alignment": GGUF([*facts(), kv("general.alignment", STRING, EVIL)], moe_tensors(0)),
    "split": GGUF([*facts(), text("split.count", EVIL)], moe_tensors(0)),
    "endless": GGUF([*facts(), text("k" * 100_000, "a"), text("k" * 100_000, "b")], moe_tensors(0)),
}


@pytest.mark.parametrize("name", EVIL_MODELS)
def test_messages_about_a_model(name: str, tmp_path: Path) -> None:
    path = EVIL_MODELS[name].write(tmp_path / "model.gguf")
    found = messages(path, tmp_path / "no.expert-pack")
    assert len(found) == 5
    assert all(message.isprintable() and len(message) < 5000 for message in found)
    assert_harmless(run("inspect", path).stderr)


def test_messages_about_a_manifest(tmp_path: Path) -> None:
    """Names of shards may hold what is no control character and yet obeyed."""
    model = tiny_moe().write(tmp_path / "model.gguf")
    pack = convert(model, safety_margin_bytes=0).path
    for edit in (
        lambda m: m["source"]["shards"][0].update(name="a\x9b31m\u202e", size_bytes=1),
        lambda m: m["layers"][0].update(group=EVIL),
        lambda m: m["layers"][0]["roles"][0].update(tensor=EVIL),
        lambda m: m.update({EVIL: 1}),
        lambda m: m.update(format=EVIL),
    ):
        convert(model, safety_margin_bytes=0, force=True)
        resign(pack, manifest=edit)
        found = messages(model, pack)
        assert len(found) >= 3
        assert all(message.isprintable() for message in found)
        assert_harmless(run("verify", pack, "--source", model).stderr)


def test_file_names_with_escapes_and_other_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[2J\nb\udcff"
    folder.mkdir()
    model = tiny_moe().write(folder / "model.gguf")
    for args in (["convert", model], ["convert", model], ["verify", model], ["inspect", model], ["inspect", folder]):
        done = run(*args)
        assert b"Traceback" not in done.stderr
        assert_harmless(done.stdout)
        assert_harmless(done.stderr)
        assert rb"a\x1b[2J\nb\xff" in done.stdout + done.stderr


def test_printable() -> None:
    for text_, expected in (("Modèle 模型 🙂", None), ("", None), ("a\tb", r"a\tb"), ("\ud800", r"\ud800")):
        assert printable(text_) == (text_ if expected is None else expected)
        assert printable(printable(text_)) == printable(text_)
    assert len(printable("x" * 10**6)) < 5000


# ---- paths that no file can have


@pytest.mark.parametrize("path", ["", "a\0b.expert-pack", "a\ud800"])
def test_impossible_paths(path: str, tmp_path: Path) -> None:
    model = tiny_moe().write(tmp_path / "model.gguf")
    for call in (
        lambda: read_model(path),
        lambda: convert(path),
        lambda: convert(model, path),
        lambda: open_pack(path),
        lambda: verify(path),
        lambda: verify(convert(model, safety_margin_bytes=0).path, source=path),
        lambda: describe(path),
        lambda: find_pack(path),
    ):
        with pytest.raises(UsageError, match=r"the path of the (model|pack|model or pack) must be") as caught:
            call()
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "args",
    [["convert", ""], ["convert", "model.gguf", "--output", ""], ["verify", ""], ["verify", "x", "--source", ""]],
)
def test_empty_paths_on_the_command_line(args: list[str]) -> None:
    """They do not mean the folder one is in."""
    done = run(*args)
    assert done.returncode == 2
    assert b"it must be the path of a file, not" in done.stderr


@pytest.mark.parametrize("path", [".", "/", "./", ".."])
def test_folders_in_place_of_files(path: str) -> None:
    for args in (["convert", path], ["verify", path], ["inspect", path]):
        done = run(*args)
        assert done.returncode == 1
        assert done.stderr.startswith(b"error: ") and done.stderr.count(b"\n") == 1
        assert b"older" in done.stderr or b"irectory" in done.stderr


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["model.gguf", "model-00001-of-00002.gguf", "model-00002-of-00002.gguf"])
def test_a_fifo_as_model_or_shard(name: str, tmp_path: Path) -> None:
    first = split(tiny_moe(), [4, 5], tmp_path)[0]
    pack = convert(first, safety_margin_bytes=0).path
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    path = tmp_path / name if name == "model.gguf" else first
    for call in (
        lambda: read_model(path),
        lambda: convert(path),
        lambda: describe(path),
        lambda: verify(pack, source=path),
        lambda: check_source(open_pack(pack), path),
    ):
        with pytest.raises(ReadError, match="it is a FIFO, not a regular file"):
            call()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", ["", ".manifest.json"])
def test_a_fifo_as_pack_or_manifest(suffix: str, tmp_path: Path) -> None:
    model = tiny_moe().write(tmp_path / "model.gguf")
    pack = convert(model, safety_margin_bytes=0).path
    Path(f"{pack}{suffix}").unlink()
    os.mkfifo(f"{pack}{suffix}")
    for call in (lambda: open_pack(pack), lambda: verify(pack), lambda: describe(pack), lambda: convert(model)):
        with pytest.raises(ReadError, match="it is a FIFO, not a regular file"):
            call()
