"""A read that never returns, as of a network file system whose server is gone: the server still ends when it is told to."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.server.faults import waiting_file
from tests.server.serving import OURS, SMALL, Server, faulty, launch, wait_for

pytestmark = pytest.mark.timeout(300)

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])

# pread hangs as long as there is a file $HANG, and says so in the file $HANG.waiting
HANGING_PREAD = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

ssize_t pread(int fd, void * bytes, size_t n, off_t at) {
    static ssize_t (*usual)(int, void *, size_t, off_t);
    usual = usual ? usual : dlsym(RTLD_NEXT, "pread");
    const char * hang = getenv("HANG");
    while (hang && access(hang, F_OK) == 0) {
        char waiting[4096];
        snprintf(waiting, sizeof(waiting), "%s.waiting", hang);
        close(open(waiting, O_CREAT | O_WRONLY, 0600));
        usleep(100000);
    }
    return usual(fd, bytes, n, at);
}
ssize_t pread64(int fd, void * bytes, size_t n, off_t at) { return pread(fd, bytes, n, at); }
"""


@pytest.fixture(scope="module")
def hanging_pread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("preload")
    (folder / "pread.c").write_text(HANGING_PREAD)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "pread.c", "-o", "pread.so", "-ldl"], cwd=folder, check=True)
    return folder / "pread.so"


def ask(server: Server, **options: str) -> None:
    """Its answer is of no interest, nor is that there is none."""
    with suppress(Exception):
        server.complete("word " * 20, 8, **options)


@contextmanager
def hung_prompt(server: Server, hang: Path, text: str = "", **options: str) -> Iterator[None]:
    """A request waits for a read that never ends."""
    server.wait_ready()
    hang.write_text(text)
    request = threading.Thread(target=ask, args=(server,), kwargs=options)
    request.start()
    try:
        wait_for(lambda: waiting_file(hang).exists())
        yield
    finally:
        server.process.kill()
        request.join()


@SIGNALS
def test_a_read_by_native_that_hangs(
    tmp_path: Path, model: Path, quarter: list[str], hanging_pread: Path, number: int
) -> None:
    hang = tmp_path / "hang"
    variables = {"LD_PRELOAD": str(hanging_pread), "HANG": str(hang)}
    server = launch(tmp_path, ["-m", str(model), *SMALL, *quarter], variables=variables)
    with hung_prompt(server, hang):
        assert server.stop(number) == 1
        assert "no read of an expert has ended" in server.log


def test_a_read_by_the_provider_that_hangs(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    fault = tmp_path / "fault"
    server = launch(tmp_path, ["-m", str(model), *SMALL, *quarter], faulty(fault))
    with hung_prompt(server, fault, "slow 10000"):
        assert server.stop() == 1
        assert "no read of an expert has ended" in server.log


def test_a_second_signal_ends_it_at_once(tmp_path: Path, model: Path, quarter: list[str], hanging_pread: Path) -> None:
    hang = tmp_path / "hang"
    variables = {"LD_PRELOAD": str(hanging_pread), "HANG": str(hang)}
    server = launch(tmp_path, ["-m", str(model), *SMALL, *quarter], variables=variables)
    with hung_prompt(server, hang):
        server.process.send_signal(signal.SIGINT)
        assert server.stop(signal.SIGTERM) == 1
        assert "Received second interrupt" in server.log


def test_waking_up_that_hangs(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    fault = tmp_path / "fault"
    server = launch(tmp_path, ["-m", str(model), *SMALL, *quarter, "--sleep-idle-seconds", "1"], faulty(fault))
    server.wait_ready()
    wait_for(lambda: server.get("/props")["is_sleeping"])
    with hung_prompt(server, fault, "open 10000"):
        assert server.stop() == 1
        assert "the model was still being loaded" in server.log


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


@pytest.mark.parametrize("signals", ["to all", *["twice"] * 4])  # by chance, which thread handles the second one
def test_a_hung_read_of_a_routers_model(
    tmp_path: Path, model: Path, quarter: list[str], hanging_pread: Path, signals: str
) -> None:
    """All processes get the signal, as from systemd, or the router gets a second one: alone it waits for its requests."""
    hang = tmp_path / "hang"
    preset = tmp_path / "models.ini"
    preset.write_text(f"[a]\nmodel = {model}\nexpert-pack = auto\n")
    variables = {"LD_PRELOAD": str(hanging_pread), "HANG": str(hang)}
    server = launch(tmp_path, ["--models-preset", str(preset), *SMALL, *quarter[2:]], OURS, variables)
    server.wait_ready()
    assert server.complete("hello", 1, model="a")[0] == 200
    with hung_prompt(server, hang, model="a"):
        children = children_of(server.process.pid)
        if signals == "to all":
            for child in children:
                os.kill(child, signal.SIGTERM)
            assert server.stop() == 0
            assert "no read of an expert has ended" in server.log
        else:
            server.process.send_signal(signal.SIGINT)
            assert server.stop(signal.SIGTERM) == 1
        wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
