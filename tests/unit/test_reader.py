from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from llama_expert_pack.pypack.drive.direct_io import PreadInto, aligned_buffer, pread_into
from llama_expert_pack.pypack.drive.reader import RETRIES, Reader
from llama_expert_pack.pypack.errors import DirectIOError, ReadError
from llama_expert_pack.pypack.stats.counters import Counters
from tests.unit.fake_pack import FakePack, fake_pack, n_open_files

MIB = 1 << 20
BLOCK = 3 * MIB + 4096
N_EXPERT = 6

Fault = Callable[[int, int], int | None]


class Faults:
    """A pread that fails as told: ``fault(n, offset)`` cuts read number n to so many bytes, or raises."""

    def __init__(self, fault: Fault, flip_at: set[int] | None = None) -> None:
        self.fault = fault
        self.flip_at = flip_at or set()
        self.n_reads = 0
        self.lock = threading.Lock()

    def __call__(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self.lock:
            self.n_reads += 1
            n = self.n_reads
        cut = self.fault(n, offset)
        done = pread_into(fd, buffer, offset)
        if cut is not None:
            buffer[cut:] = b"\xee" * (len(buffer) - cut)
            done = min(cut, done)
        if n in self.flip_at:
            buffer[done // 2] ^= 1
        return done


@contextmanager
def open_reader(
    pack: FakePack, direct_io: bool = True, pread: PreadInto = pread_into
) -> Iterator[tuple[Reader, Counters]]:
    counters = Counters()
    reader = Reader(pack, direct_io=direct_io, counters=counters, pread=pread)
    try:
        yield reader, counters
    finally:
        reader.close()


def read(reader: Reader, pack: FakePack, experts: list[int], staged: bool = False) -> list[ReadError | None]:
    """Read all at once; what succeeded must be the expert's bytes, though the memory was dirty.

    ``staged``: into memory that only copies reach.
    """
    ended: SimpleQueue[tuple[int, ReadError | None]] = SimpleQueue()
    buffers = [aligned_buffer(pack.layers[0].block_bytes) for _ in experts]
    for i, (expert, buffer) in enumerate(zip(experts, buffers, strict=True)):
        buffer[:] = b"\xff" * len(buffer)

        def deliver(block: memoryview, buffer: memoryview = buffer) -> None:
            buffer[:] = block

        reader.submit(0, expert, deliver if staged else buffer, lambda error, i=i: ended.put((i, error)))  # type: ignore[misc]
    results = dict(ended.get(timeout=60) for _ in experts)
    with pytest.raises(Empty):
        ended.get(timeout=0.01)
    for i, error in results.items():
        assert error is not None or bytes(buffers[i]) == pack.blocks[experts[i]]
        assert error is None or not staged or set(buffers[i]) == {0xFF}, "nothing was copied"
    return [results[i] for i in range(len(experts))]


@pytest.fixture
def pack(tmp_path: Path) -> FakePack:
    return fake_pack(tmp_path / "model.expert-pack", N_EXPERT, BLOCK)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("direct_io", [True, False])
def test_experts_arrive_whole(pack: FakePack, direct_io: bool, staged: bool) -> None:
    with open_reader(pack, direct_io) as (reader, counters):
        assert read(reader, pack, [5, 0, 3, 3, 1, 2, 4, 0], staged) == [None] * 8
    stats = counters.snapshot()
    assert stats.fallbacks == (0 if direct_io else 8)
    assert stats.read_bytes == 8 * BLOCK
    assert (stats.io_errors, stats.io_retries) == (0, 0)


class Gate:
    """Holds every read until opened, and knows the blocks that waited."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.blocks: set[int] = set()

    def __call__(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.blocks.add(offset // BLOCK)
        assert self.opened.wait(60)
        return pread_into(fd, buffer, offset)


def test_two_blocks_are_read_at_a_time(pack: FakePack) -> None:
    gate, ended = Gate(), SimpleQueue[Any]()
    with open_reader(pack, pread=gate) as (reader, _):
        for expert in range(N_EXPERT):
            reader.submit(0, expert, aligned_buffer(BLOCK), ended.put)
        with pytest.raises(Empty):
            ended.get(timeout=0.2)
        assert gate.blocks == {0, 1}
        gate.opened.set()
        assert [ended.get(timeout=60) for _ in range(N_EXPERT)] == [None] * N_EXPERT
    assert gate.blocks == set(range(N_EXPERT))


def test_close_waits_for_everything_and_may_be_repeated(pack: FakePack) -> None:
    gate, ended = Gate(), SimpleQueue[Any]()
    fds_before = n_open_files()
    reader = Reader(pack, pread=gate)
    for expert in range(N_EXPERT):
        reader.submit(0, expert, aligned_buffer(BLOCK), ended.put)
    closers = [threading.Thread(target=reader.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    assert ended.empty()
    gate.opened.set()
    for closer in closers:
        closer.join(60)
        assert not closer.is_alive()
    assert ended.qsize() == N_EXPERT
    reader.close()
    assert n_open_files() == fds_before
    assert not any(thread.name.startswith("expert-reader") for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        reader.submit(0, 0, aligned_buffer(BLOCK), ended.put)


# ---- faults: each is retried, counted, and kept from the neighbours


def fail_with(code: int) -> Fault:
    def fault(n: int, offset: int) -> int | None:
        if n == 2:
            raise OSError(code, os.strerror(code))
        return None

    return fault


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
def test_a_failed_read_is_tried_again(pack: FakePack, code: int) -> None:
    with open_reader(pack, pread=Faults(fail_with(code))) as (reader, counters):
        assert read(reader, pack, list(range(6))) == [None] * 6
    stats = counters.snapshot()
    assert (stats.io_errors, stats.io_retries) == (1, 1)


def test_a_read_that_ends_early_is_tried_again(pack: FakePack) -> None:
    with open_reader(pack, pread=Faults(lambda n, offset: 0 if n == 3 else None)) as (reader, counters):
        assert read(reader, pack, list(range(6))) == [None] * 6
    assert counters.snapshot().io_errors == 1


def test_a_short_read_is_completed_and_no_error(pack: FakePack) -> None:
    with open_reader(pack, pread=Faults(lambda n, offset: 1000 + 3096 if n <= 3 else None)) as (
        reader,
        counters,
    ):
        assert read(reader, pack, list(range(6))) == [None] * 6
    assert counters.snapshot().io_errors == 0


def test_a_flipped_bit_is_found_at_any_read_and_read_again(pack: FakePack) -> None:
    with open_reader(pack, pread=Faults(lambda n, o: None, flip_at={2, 6})) as (reader, counters):
        assert read(reader, pack, [0, 1, 2]) == [None] * 3
        assert read(reader, pack, [0, 1, 2]) == [None] * 3
    stats = counters.snapshot()
    assert (stats.io_errors, stats.io_retries) == (2, 2)


@pytest.mark.parametrize("staged", [False, True])
def test_a_bad_expert_fails_alone_after_all_retries(pack: FakePack, staged: bool) -> None:
    start = pack.offset(0, 3)

    def fault(n: int, offset: int) -> int | None:
        if start <= offset < start + BLOCK:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return None

    with open_reader(pack, pread=Faults(fault)) as (reader, counters):
        results = [read(reader, pack, [expert], staged)[0] for expert in range(6)]
        assert read(reader, pack, [0, 1, 2, 4, 5], staged) == [None] * 5
    assert [i for i, error in enumerate(results) if error is not None] == [3]
    error = results[3]
    assert isinstance(error, ReadError) and error.errno == errno.EIO
    assert str(error) == f"{pack.path}: expert 3 of layer 0 could not be read: Input/output error"
    stats = counters.snapshot()
    assert (stats.io_errors, stats.io_retries) == (RETRIES + 1, RETRIES)


@pytest.mark.parametrize("staged", [False, True])
def test_a_damaged_file_names_expert_and_checksums(pack: FakePack, staged: bool) -> None:
    with open(pack.path, "r+b") as file:
        file.seek(pack.offset(0, 4) + 1000)
        file.write(bytes(64))
    with open_reader(pack) as (reader, counters):
        results = read(reader, pack, list(range(6)), staged)
    assert [i for i, error in enumerate(results) if error is not None] == [4]
    assert pack.digest(0, 4).hex() in str(results[4]) and "expert 4 of layer 0" in str(results[4])
    assert isinstance(results[4], ReadError) and results[4].errno == 0
    stats = counters.snapshot()
    assert (stats.io_errors, stats.io_retries) == (RETRIES + 1, RETRIES)
    assert stats.read_bytes == (5 + RETRIES + 1) * BLOCK


def test_a_truncated_file(pack: FakePack) -> None:
    os.truncate(pack.path, pack.offset(0, 5) + 5000)
    with open_reader(pack) as (reader, _):
        results = read(reader, pack, list(range(6)))
    assert [i for i, error in enumerate(results) if error is not None] == [5]
    assert "expected" in str(results[5]) and "found" in str(results[5])


def test_a_callback_that_raises_or_submits_harms_nobody(pack: FakePack, caplog: pytest.LogCaptureFixture) -> None:
    ended: SimpleQueue[Any] = SimpleQueue()

    def again(error: ReadError | None) -> None:
        reader.submit(0, 1, aligned_buffer(BLOCK), ended.put)
        raise ValueError("mine")

    with open_reader(pack) as (reader, _):
        reader.submit(0, 0, aligned_buffer(BLOCK), again)
        assert ended.get(timeout=60) is None
    assert "was not handled" in caplog.text


def test_a_broken_pread_ends_as_an_error_too(pack: FakePack) -> None:
    def broken(n: int, offset: int) -> int | None:
        raise ZeroDivisionError("bug")

    with open_reader(pack, pread=Faults(broken)) as (reader, _):
        (error,) = read(reader, pack, [0])
    assert error is not None and str(error).endswith("could not be read: bug")


@pytest.mark.parametrize("cause", [ReadError("the device is gone"), ValueError("the device is gone")])
def test_a_failed_copy_fails_its_expert_only(pack: FakePack, cause: Exception) -> None:
    ended: SimpleQueue[ReadError | None] = SimpleQueue()

    def lost(block: memoryview) -> None:
        raise cause

    with open_reader(pack) as (reader, counters):
        reader.submit(0, 0, lost, ended.put)
        assert "the device is gone" in str(ended.get(timeout=60))
        assert read(reader, pack, [0, 1], staged=True) == [None, None]
    assert counters.snapshot().io_errors == 0, "the read was right"


# ---- what cannot work is refused


@pytest.mark.parametrize("direct_io", [True, False])
def test_large_reads_that_are_refused_hint_at_direct_io(pack: FakePack, direct_io: bool) -> None:
    """Opening and the trial read of a page went well."""

    def refuse(fd: int, buffer: memoryview, offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with open_reader(pack, direct_io, refuse) as (reader, _):
        (error,) = read(reader, pack, [0])
    assert error is not None and error.errno == errno.EINVAL
    assert ("expert_direct_io=False" in str(error)) is direct_io


def test_a_file_system_without_direct_io_needs_the_option(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a ramfs needs root")
    folder = tmp_path / "ramfs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", str(folder)], check=True)
    try:
        pack = fake_pack(folder / "pack", 2, 8192)
        with pytest.raises(DirectIOError, match="expert_direct_io=False"):
            Reader(pack)
        with open_reader(pack, direct_io=False) as (reader, counters):
            assert read(reader, pack, [0, 1]) == [None, None]
        assert counters.snapshot().fallbacks == 2
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_reader_that_gets_no_more_threads_leaves_nothing(pack: FakePack, monkeypatch: pytest.MonkeyPatch) -> None:
    n_threads, n_files = threading.active_count(), n_open_files()
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Reader(pack)
    assert (threading.active_count(), n_open_files()) == (n_threads, n_files)


def test_wrong_destinations_and_experts(tmp_path: Path) -> None:
    pack = fake_pack(tmp_path / "pack", 2, 8192)
    called: list[Any] = []
    with open_reader(pack) as (reader, _):
        for dest in (
            aligned_buffer(4096),
            aligned_buffer(12288),
            memoryview(bytes(8192)),
            aligned_buffer(16384)[::2],
        ):
            with pytest.raises(ValueError, match="needs 8192 writable bytes"):
                reader.submit(0, 0, dest, called.append)
        with pytest.raises(ValueError, match="aligned to 4096"):
            reader.submit(0, 0, aligned_buffer(8192 + 16)[16:], called.append)
        for layer, expert in ((1, 0), (-1, 0), (0, 2), (0, -1)):
            with pytest.raises(IndexError):
                reader.submit(layer, expert, aligned_buffer(8192), called.append)
    assert called == []
