from __future__ import annotations

import json
import logging
import os
import pty
import select
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_expert_pack.pypack.errors import UsageError
from llama_expert_pack.pypack.stats.counters import Counter, Counters
from llama_expert_pack.pypack.stats.stats_file import StatsWriter


def read(path: Path) -> dict[str, float]:
    stats: dict[str, float] = json.loads(path.read_text())
    return stats


def test_written_at_start_at_the_interval_and_at_close(tmp_path: Path) -> None:
    counters, path = Counters(), tmp_path / "stats.json"
    writer = StatsWriter(path, 0.01, counters.snapshot)
    assert read(path)["evictions"] == 0
    counters.add(Counter.EVICTIONS, 5)
    deadline = time.monotonic() + 30
    while read(path)["evictions"] != 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert read(path)["evictions"] == 5
    counters.add(Counter.EVICTIONS)
    writer.close()
    writer.close()
    assert read(path)["evictions"] == 6
    assert [entry.name for entry in tmp_path.iterdir()] == ["stats.json"]


def test_close_writes_even_if_the_interval_never_passes(tmp_path: Path) -> None:
    counters, path = Counters(), tmp_path / "stats.json"
    for n, interval_s in enumerate((1e6, 1e300), 1):  # more seconds than a thread can wait for
        writer = StatsWriter(path, interval_s, counters.snapshot)
        counters.add(Counter.FALLBACKS)
        time.sleep(0.05)  # for the thread to begin to wait
        writer.close()
        assert read(path)["fallbacks"] == n


@pytest.mark.parametrize("where", ["missing/stats.json", "."])
def test_a_bad_path_fails_at_start(tmp_path: Path, where: str) -> None:
    with pytest.raises(UsageError, match=r"statistics file cannot be written: .*folder that exists"):
        StatsWriter(tmp_path / where, 1, Counters().snapshot)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("interval_s", [0, -1, float("nan"), float("inf"), 10**400, "often"])
def test_a_bad_interval_fails(tmp_path: Path, interval_s: float) -> None:
    with pytest.raises(UsageError, match="interval"):
        StatsWriter(tmp_path / "stats.json", interval_s, Counters().snapshot)


def test_a_later_failure_is_logged_and_harmless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    writer = StatsWriter(folder / "stats.json", 1e6, Counters().snapshot)
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING):
        writer.close()
    assert "could not be written" in caplog.text


def write_once(path: Path | str) -> None:
    StatsWriter(path, 1e6, Counters().snapshot).close()


@pytest.mark.parametrize("content", [b"GGUF", b"{}", b"[]", b'{"hits": 1, "misses": 2}', b"\xff", b"[" * 100_000, b"7"])
def test_a_file_that_is_something_else_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "stats.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"stats.json: .*something else than statistics, which would be lost"):
        write_once(path)
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]


def test_an_empty_file_and_older_statistics_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    path.touch(0o640)
    path.chmod(0o640)
    for _ in range(2):
        write_once(path)
        assert read(path)["hits"] == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_read_only_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    write_once(path)
    path.chmod(0o444)
    before = path.stat().st_ino
    with pytest.raises(UsageError, match=r"stats.json: .*it is read-only"):
        write_once(path)
    assert path.stat().st_ino == before


def test_links_are_followed_and_stay(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "stats.json"
    link.symlink_to("folder/real.json")
    for _ in range(2):  # the target does not exist first
        write_once(link)
        assert link.is_symlink() and read(tmp_path / "folder" / "real.json")["hits"] == 0
    assert [entry.name for entry in (tmp_path / "folder").iterdir()] == ["real.json"]


def full_device(folder: Path) -> Path:
    """/dev/full for who can't replace it, else one of one's own: a wrong writer must not harm the machine."""
    if os.geteuid() != 0:
        return Path("/dev/full")
    try:
        os.mknod(folder / "full", stat.S_IFCHR | 0o666, os.makedev(1, 7))
        (folder / "full").open("rb").close()
    except PermissionError as error:
        pytest.skip(f"no device can be made here: {error}")
    return folder / "full"


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    device = full_device(tmp_path)
    (tmp_path / "link").symlink_to(device)
    for path in (device, tmp_path / "link"):
        with pytest.raises(UsageError, match=f"{path.name}: .*No space left on device"):
            write_once(path)
    assert device.is_char_device() and (tmp_path / "link").is_symlink()


def test_a_terminal_gets_lines() -> None:
    try:
        master, slave = pty.openpty()
    except OSError as error:  # /dev/pts is not mounted in every container
        pytest.skip(f"no terminal can be had: {error}")
    write_once(os.ttyname(slave))
    assert json.loads(os.read(master, 1 << 16).splitlines()[0])["hits"] == 0
    os.close(master)
    os.close(slave)


@pytest.mark.timeout(60)
def test_a_fifo_never_waits_for_its_reader(tmp_path: Path) -> None:
    path, counters = tmp_path / "fifo", Counters()
    os.mkfifo(path)
    writer = StatsWriter(path, 1e-4, counters.snapshot)  # nobody reads
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert select.select([fd], [], [], 30)[0]
    assert json.loads(os.read(fd, 1 << 20).split(b"\n")[0])["hits"] == 0
    full = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(full, b"x" * 512)
    counters.add(Counter.HITS)
    writer.close()  # the pipe is full
    os.close(full)
    os.close(fd)
    assert stat.S_ISFIFO(path.stat().st_mode) and list(tmp_path.iterdir()) == [path]


def test_what_stderr_goes_to_gets_lines(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from llama_expert_pack.pypack.stats.counters import Counters\n"
        "from llama_expert_pack.pypack.stats.stats_file import StatsWriter\n"
        "StatsWriter(sys.argv[1], 1e6, Counters().snapshot).close()\n"
        "print('said later', file=sys.stderr)\n"
    )
    log = tmp_path / "log"
    for path in ("/proc/self/fd/2", str(log)):  # where /dev/stderr leads, and by its name
        with log.open("wb") as stderr:  # empty: it could be taken for a file to replace
            subprocess.run([sys.executable, "-c", code, path], stderr=stderr, check=True)
        lines = log.read_text().splitlines()
        assert lines[-1] == "said later" and [json.loads(line)["hits"] for line in lines[:-1]] == [0, 0]


def test_the_temporary_file_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda n: "00")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = tmp_path / f".expert-stats.{os.getpid()}.00.partial"
    link.symlink_to(victim)
    with pytest.raises(UsageError, match="cannot be written: File exists"):
        write_once(tmp_path / "stats.json")
    assert victim.read_text() == "precious" and not (tmp_path / "stats.json").exists()


def test_a_second_writer_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    path, counters = tmp_path / "stats.json", Counters()
    first = StatsWriter(path, 0.001, counters.snapshot)
    for _ in range(20):
        with pytest.raises(UsageError, match=r"stats.json: .*it is being written by another run"):
            write_once(path)
    counters.add(Counter.HITS)
    first.close()
    assert read(path)["hits"] == 1
    write_once(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["stats.json"]


def updates(path: Path, then: Callable[[StatsWriter], None]) -> None:
    """A writer on the path that has written once, then ``then``, then its last update."""
    counters = Counters()
    writer = StatsWriter(path, 1000, counters.snapshot)
    counters.add(Counter.HITS, 7)
    then(writer)
    writer.close()


def test_the_place_is_the_one_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "stats.json").write_text("a model")
    monkeypatch.chdir(tmp_path / "run")
    updates(Path("stats.json"), lambda _: os.chdir(".."))
    assert json.loads((tmp_path / "run" / "stats.json").read_text())["hits"] == 7
    assert (tmp_path / "stats.json").read_text() == "a model"


@pytest.mark.parametrize("how", ["a link that leads elsewhere now", "another file moved there", "a new file"])
def test_what_took_the_place_meanwhile_stays(how: str, tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "stats.json"
    other.write_text("a model")
    if how.startswith("a link"):
        (tmp_path / "first.json").write_text("")
        path.symlink_to("first.json")

    def change(_: StatsWriter) -> None:
        if how.startswith("a link"):
            path.unlink()
            path.symlink_to("other")
        elif how.startswith("another"):
            other.replace(path)
        else:
            path.unlink()
            path.write_text("a model")

    updates(path, change)
    assert path.read_text() == "a model"
    assert not list(tmp_path.glob(".expert-stats*"))
    if how.startswith("a link"):
        assert json.loads((tmp_path / "first.json").read_text())["hits"] == 7


def test_a_child_that_is_forked_during_an_update_gets_no_half_of_it(tmp_path: Path) -> None:
    """An update holds a lock that a fork waits for, so what a child inherits is whole."""
    writer = StatsWriter(tmp_path / "stats.json", 1e-4, Counters().snapshot)
    try:
        for _ in range(200):
            pid = os.fork()
            if pid == 0:
                try:
                    writer.close()
                except BaseException:
                    os._exit(1)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        writer.close()
