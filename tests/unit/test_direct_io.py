from __future__ import annotations

import errno
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_expert_pack.pypack.drive.direct_io import address, aligned_buffer, open_file, read_exact
from llama_expert_pack.pypack.errors import DirectIOError, ReadError
from tests.unit.fake_pack import n_open_files


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    path = tmp_path / "pages"
    path.write_bytes(os.urandom(5 * 4096 + 100))
    return path


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A file system that has no O_DIRECT."""
    if os.geteuid() != 0:
        pytest.skip("mounting a ramfs needs root")
    folder = tmp_path / "ramfs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("n_bytes", [0, 1, 4096, 5000, 3 << 20])
def test_buffers_are_aligned_zeroed_and_writable(n_bytes: int) -> None:
    buffer = aligned_buffer(n_bytes)
    assert buffer.nbytes == n_bytes and not buffer.readonly
    assert not any(bytes(buffer))
    if n_bytes:
        assert address(buffer) % 4096 == 0


def test_direct_reads_return_the_file(pages: Path) -> None:
    fd = open_file(pages)
    assert os.get_blocking(fd) and not os.get_inheritable(fd)
    buffer = aligned_buffer(4 * 4096)
    assert read_exact(fd, buffer, 4096) == 4 * 4096
    assert bytes(buffer) == pages.read_bytes()[4096 : 5 * 4096]
    os.close(fd)


def test_the_descriptor_is_direct_only_if_asked(pages: Path) -> None:
    for direct_io in (True, False):
        fd = open_file(pages, direct_io)
        assert bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT) is direct_io
        os.close(fd)


def test_the_tail_of_a_file_can_be_read_directly(pages: Path) -> None:
    fd = open_file(pages)
    buffer = aligned_buffer(2 * 4096)
    assert read_exact(fd, buffer, 4 * 4096, n_needed=4196) == 4196
    assert bytes(buffer[:4196]) == pages.read_bytes()[4 * 4096 :]
    with pytest.raises(ReadError, match="expected 4197 bytes at offset 16384, found 4196") as caught:
        read_exact(fd, buffer, 4 * 4096, n_needed=4197)
    assert caught.value.errno == 0
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097])
def test_files_of_any_size_open(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    os.close(open_file(path))


def test_a_file_system_without_direct_io_is_refused_by_name(ramfs: Path) -> None:
    path = ramfs / "file"
    path.write_bytes(bytes(8192))
    before = n_open_files()
    with pytest.raises(DirectIOError, match=r"ramfs/file.*expert_direct_io=False"):
        open_file(path)
    assert n_open_files() == before
    os.close(open_file(path, direct_io=False))


def test_procfs_is_refused_too() -> None:
    with pytest.raises(DirectIOError, match="refuses to open files with O_DIRECT"):
        open_file("/proc/version")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("direct_io", [True, False])
def test_a_fifo_is_no_matter_of_direct_io(tmp_path: Path, direct_io: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = n_open_files()
    with pytest.raises(ReadError, match="cannot be opened: it is a FIFO, not a regular file"):
        open_file(tmp_path / "pipe", direct_io)
    assert n_open_files() == before


def test_a_failing_trial_read_is_refused(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    before = n_open_files()
    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(DirectIOError, match="direct read of 4096 bytes at offset 0 failed: Invalid argument"):
        open_file(pages)
    assert n_open_files() == before


def test_the_trial_read_asks_for_no_more_alignment_than_the_contract(
    pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[int, int]] = []

    def record(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append((address(buffers[0]), offset))
        return 4096

    monkeypatch.setattr(os, "preadv", record)
    os.close(open_file(pages))
    assert all(at % 8192 == 4096 for at, _ in reads)
    assert {offset for _, offset in reads} == {0, 4096, 4 * 4096}


@pytest.mark.parametrize(
    ("memory", "offset", "message"),
    [
        (0, 0, "does not support direct I/O"),
        (4, 16384, "aligned to 4 and offsets to 16384"),
        (8192, 512, "aligned to 8192"),
        (4, 512, None),
        (4096, 4096, None),
        (None, None, None),
    ],
)
def test_what_statx_says_counts(
    pages: Path, monkeypatch: pytest.MonkeyPatch, memory: int | None, offset: int | None, message: str | None
) -> None:
    found = SimpleNamespace(stx_dio_mem_align=memory, stx_dio_offset_align=offset)
    monkeypatch.setattr(os, "STATX_DIOALIGN", 0x2000, raising=False)
    monkeypatch.setattr(os, "statx", lambda path, mask: found, raising=False)
    if message is None:
        os.close(open_file(pages))
    else:
        with pytest.raises(DirectIOError, match=message):
            open_file(pages)


def test_a_missing_file_is_no_matter_of_direct_io(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="missing: cannot be opened: No such file") as caught:
        open_file(tmp_path / "missing")
    assert caught.value.errno == errno.ENOENT


class Pread:
    """Reads from memory, each time as many bytes as the script says: a number, or an error to raise."""

    def __init__(self, data: bytes, script: list[int | OSError]) -> None:
        self.data = data
        self.script = script
        self.offsets: list[int] = []

    def __call__(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.offsets.append(offset)
        step = self.script.pop(0)
        if isinstance(step, OSError):
            raise step
        got = self.data[offset : offset + min(step, len(buffer))]
        buffer[: len(got)] = got
        return len(got)


DATA = os.urandom(4 * 4096)


def test_short_reads_go_on_where_alignment_allows() -> None:
    pread = Pread(DATA, [4096 + 512, 8192, 4096])
    buffer = aligned_buffer(len(DATA))
    assert read_exact(-1, buffer, 0, pread=pread) == 4096 + 512 + 8192 + 4096
    assert pread.offsets == [0, 4096, 12288]
    assert bytes(buffer) == DATA


def test_short_reads_without_direct_io_go_on_at_the_next_byte() -> None:
    pread = Pread(DATA, [1, 4999, 100])
    buffer = memoryview(bytearray(5100))
    assert read_exact(-1, buffer, 7, alignment=1, pread=pread) == 5100
    assert pread.offsets == [7, 8, 5007]
    assert bytes(buffer) == DATA[7:5107]


def test_an_interrupted_read_is_repeated() -> None:
    buffer = aligned_buffer(4096)
    assert read_exact(-1, buffer, 0, pread=Pread(DATA, [InterruptedError(), 4096])) == 4096
    assert bytes(buffer) == DATA[:4096]


def test_the_end_of_the_file_and_a_read_without_progress_are_errors() -> None:
    for script in ([4096, 0], [4096, 100]):
        with pytest.raises(ReadError, match="expected 8192 bytes at offset 0, found"):
            read_exact(-1, aligned_buffer(8192), 0, pread=Pread(DATA, list(script)))


def test_what_the_system_refuses_is_passed_on() -> None:
    with pytest.raises(OSError, match="broken"):
        read_exact(-1, aligned_buffer(8192), 0, pread=Pread(DATA, [4096, OSError(errno.EIO, "broken")]))
