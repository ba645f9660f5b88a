"""The replay's processes: they end with the command, whatever ends it, and are not needed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llama_expert_pack.pypack.errors import ExpertPackError
from llama_expert_pack.pypack.replay.processes import map_in_processes

ROOT = Path(__file__).parents[2]
PARENT = os.getpid()
# prints the number of each process that works on a job, as the command does it
COMMAND = """
import os, sys, time, click
from llama_expert_pack.pypack.command.cli import main, cli
from llama_expert_pack.pypack.replay.processes import map_in_processes
@cli.command("wait")
def wait():
    map_in_processes(lambda n: (os.write(1, b"%d\\n" % os.getpid()), time.sleep(600)), range(8), 2)
main(["wait"])
"""


def test_they_count_the_same_and_one_that_dies_is_noticed() -> None:
    assert map_in_processes(lambda n: (n, os.getpid() == PARENT), range(3), 2) == [(n, False) for n in range(3)]
    with pytest.raises(ExpertPackError, match="a process of the replay was killed: free memory"):
        map_in_processes(lambda _: os.kill(os.getpid(), signal.SIGKILL), range(3), 2)


@pytest.mark.parametrize("forks", [0, 1])
def test_where_none_can_be_started(forks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a container; the process that could be started does not stay."""
    fork, n_left = os.fork, forks

    def limited() -> int:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    assert map_in_processes(lambda n: (n, os.getpid() == PARENT), range(3), 2) == [(n, True) for n in range(3)]
    for child in multiprocessing.active_children():
        child.join()


def test_where_there_are_no_semaphores(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(multiprocessing.get_context("fork"), "Lock", refuse)
    assert map_in_processes(lambda n: os.getpid() == PARENT, range(3), 2) == [True] * 3


@pytest.mark.parametrize(
    ("number", "is_to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)]
)
def test_they_end_with_the_command(number: signal.Signals, is_to_all: bool) -> None:
    """Ctrl-C goes to all of a terminal's processes, ``kill`` to one."""
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert command.stdout is not None and command.stderr is not None
    workers = [int(command.stdout.readline()) for _ in range(2)]
    (os.killpg if is_to_all else os.kill)(command.pid, number)
    assert command.wait() == (130 if number == signal.SIGINT else -number)
    said = command.stderr.read()  # until no process is left that could write
    assert said == ("" if not is_to_all else "interrupted: a conversion goes on when the same command is run again\n")
    assert command.stdout.read() == ""
    while any(_runs(worker) for worker in workers):
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
