"""A conversion may be stopped at any moment: no half pack is accepted, and a rerun gives the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import PackError
from llama_expert_pack.pypack.format.pack import open_pack
from tests.gguf_bytes import tiny_moe
from tests.pack_tools import manifest_of

# The command, with slower writes; a while after the n-th of them it gets a signal.
COMMAND = """
import os, sys, threading, time
from llama_expert_pack.pypack.command.cli import main
sys.modules["llama_expert_pack.pypack.convert.convert"].CHECKPOINT_INTERVAL_S = 0
from llama_expert_pack.pypack.convert.partial_pack import PartialPack
model, n, delay_s, number = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
timer = threading.Timer(delay_s, os.kill, (os.getpid(), number))
timer.daemon = True
write_blocks = PartialPack.write_blocks
written = []
def slow(self, data, offset):
    time.sleep(0.01)
    write_blocks(self, data, offset)
    written.append(offset)
    if len(written) == n:
        timer.start()
PartialPack.write_blocks = slow
main(["convert", model, "--safety-margin-gib", "0", "--jobs", "2"])
"""
N_TRIALS = 20


@pytest.fixture(autouse=True)
def checkpoint_after_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("llama_expert_pack.pypack.convert.convert"), "CHECKPOINT_INTERVAL_S", 0)


def files_of(pack: Path) -> tuple[bytes, bytes]:
    return pack.read_bytes(), manifest_of(pack).read_bytes()


def is_accepted(pack: Path) -> bool:
    try:
        open_pack(pack)
    except PackError:
        return False
    return True


def clean(model: Path) -> None:
    for path in model.parent.iterdir():
        if path != model:
            path.unlink()


def test_signals_at_random_moments(tmp_path: Path) -> None:
    n_layers = 24
    model = tiny_moe(n_block=n_layers, n_expert=8, n_embd=256, n_ff=128).write(tmp_path / "model.gguf")
    pack = tmp_path / "model.expert-pack"
    reference = files_of(convert(model, safety_margin_bytes=0).path)
    rng = random.Random(2)
    stopped = resumed = 0
    for trial in range(N_TRIALS):
        clean(model)
        kind = (signal.SIGKILL, signal.SIGINT)[trial % 2]
        when = (rng.randint(1, n_layers), rng.uniform(0, 0.05))
        command = [sys.executable, "-c", COMMAND, str(model), *map(str, when), str(int(kind))]
        process = subprocess.run(command, capture_output=True, text=True)
        stopped += process.returncode != 0
        if process.returncode == -signal.SIGINT:  # Python itself was already leaving
            assert is_accepted(pack)
        elif kind == signal.SIGINT and process.returncode:
            assert process.returncode == 130
            lines = [line for line in process.stderr.splitlines() if not line.startswith("convert: ")]
            assert len(lines) == 1
            assert lines[0].startswith("interrupted: ")
        assert not is_accepted(pack) or files_of(pack) == reference
        resumed += convert(model, safety_margin_bytes=0).resumed_layers > 0
        assert files_of(pack) == reference
        assert {path.name for path in tmp_path.iterdir()} == {model.name, pack.name, manifest_of(pack).name}
    assert stopped >= N_TRIALS // 2
    assert resumed >= N_TRIALS // 4


class Crash:
    """Ends the process, without any cleaning up, at the n-th step that changes anything on the disk."""

    STEPS = ((os, ("pwrite", "fsync", "ftruncate", "posix_fallocate")), (Path, ("replace", "unlink")))

    def __init__(self, at_step: int) -> None:
        self.left = at_step
        for owner, names in self.STEPS:
            for name in names:
                setattr(owner, name, self._wrap(getattr(owner, name)))

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                os._exit(9)
            return function(*args, **kwargs)

        return step


def crashed(at_step: int, model: Path, **options: Any) -> bool:
    """Converts in a child process that dies at a step; False if it came to the end before."""
    child = os.fork()
    if child == 0:
        try:
            Crash(at_step)
            convert(model, jobs=1, safety_margin_bytes=0, **options)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


@pytest.mark.parametrize("replacing", [False, True])
def test_crash_at_every_step(replacing: bool, tmp_path: Path) -> None:
    """Also while an older pack is replaced: it is that of the other model, that of this one, or none at all."""
    model = tmp_path / "model.gguf"
    pack = tmp_path / "model.expert-pack"
    tiny_moe(seed=1).write(model)
    old = files_of(convert(model, safety_margin_bytes=0).path)
    clean(model)
    tiny_moe(seed=2).write(model)
    new = files_of(convert(model, safety_margin_bytes=0).path)
    step = 0
    while True:
        clean(model)
        if replacing:
            pack.write_bytes(old[0])
            manifest_of(pack).write_bytes(old[1])
        if not crashed(step, model, force=replacing):
            break
        if is_accepted(pack):
            assert files_of(pack) in ([old, new] if replacing else [new])
        convert(model, force=replacing, safety_margin_bytes=0)
        assert files_of(pack) == new
        assert {path.name for path in tmp_path.iterdir()} == {model.name, pack.name, manifest_of(pack).name}
        step += 1
    assert step > 20
    assert files_of(pack) == new


def test_crashes_one_after_another(tmp_path: Path) -> None:
    """Every run gets a few steps further than the last; the result is the same."""
    model = tiny_moe(n_block=6).write(tmp_path / "model.gguf")
    pack = tmp_path / "model.expert-pack"
    reference = files_of(convert(model, safety_margin_bytes=0).path)
    clean(model)
    runs = 1
    while crashed(17, model):
        assert not is_accepted(pack) or files_of(pack) == reference
        runs += 1
        assert runs < 50
    assert runs > 2
    assert files_of(pack) == reference
