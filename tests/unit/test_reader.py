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

from llama_expert_pack.pypack.drive.direct_io import aligned_buffer, pread_into
from llama_expert_pack.pypack.drive.reader import Reader, _cut
from llama_expert_pack.pypack.errors import DirectIOError, PackError, ReadError, UsageError
from llama_expert_pack.pypack.format.layout import Extent, Layer
from llama_expert_pack.pypack.stats.counters import Counters
from tests.unit.fake_pack import FakePack, n_open_files

MIB = 1 << 20
BLOCK = 5 * MIB + 4096
# three roles at odd places of the file, with zero padding between and behind them
INDEX_PIECES = [(2 * MIB + 32, 0), (MIB + 96, 2 * MIB + 256), (65, 4 * MIB - 4096)]

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
def open_reader(pack: FakePack, **options: Any) -> Iterator[tuple[Reader, Counters]]:
    counters = Counters()
    reader = Reader(pack, counters=counters, **options)
    try:
        yield reader, counters
    finally:
        reader.close()


def read(reader: Reader, pack: FakePack, experts: list[int]) -> list[ReadError | None]:
    """Read all at once; what succeeded must be the expert's bytes, though the memory was dirty."""
    ended: SimpleQueue[tuple[int, ReadError | None]] = SimpleQueue()
    buffers = [aligned_buffer(pack.layers[0].block_bytes) for _ in experts]
    for i, (expert, buffer) in enumerate(zip(experts, buffers, strict=True)):
        buffer[:] = b"\xff" * len(buffer)
        reader.submit(0, expert, buffer, lambda error, i=i: ended.put((i, error)))  # type: ignore[misc]
    results = dict(ended.get(timeout=60) for _ in experts)
    with pytest.raises(Empty):
        ended.get(timeout=0.01)
    for i, error in results.items():
        assert error is not None or bytes(buffers[i]) == pack.blocks[experts[i]]
    return [results[i] for i in range(len(experts))]


@pytest.fixture(params=["packed", "index-only"])
def pack(request: pytest.FixtureRequest, tmp_path: Path) -> FakePack:
    if request.param == "packed":
        return FakePack(tmp_path / "model.expert-pack", 6, BLOCK)
    return FakePack(tmp_path / "model.gguf", 6, BLOCK, INDEX_PIECES, start=1184)


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize(("read_splits", "stage_slots"), [(1, 1), (4, 2), (7, 12), (16, 16)])
def test_experts_arrive_whole(pack: FakePack, direct_io: bool, read_splits: int, stage_slots: int) -> None:
    with open_reader(pack, direct_io=direct_io, read_splits=read_splits, stage_slots=stage_slots) as (
        reader,
        counters,
    ):
        assert read(reader, pack, [5, 0, 3, 3, 1, 2, 4, 0]) == [None] * 8
    stats = counters.snapshot()
    wanted = sum(extent.length for extent in pack.extents(0, 0)) * 8
    assert stats.fallbacks == (0 if direct_io else 8)
    assert wanted <= stats.read_bytes <= wanted * 1.05
    if not direct_io or len(pack.extents(0, 0)) == 1:
        assert stats.read_bytes == wanted
    assert (stats.io_errors, stats.io_retries) == (0, 0)


def test_direct_reads_are_aligned_and_one_block_is_split(pack: FakePack) -> None:
    reads: list[tuple[int, int]] = []

    def record(fd: int, buffer: memoryview, offset: int) -> int:
        reads.append((offset, len(buffer)))
        return pread_into(fd, buffer, offset)

    with open_reader(pack, read_splits=3, pread=record) as (reader, _):
        assert read(reader, pack, [2]) == [None]
    assert all(offset % 4096 == length % 4096 == 0 for offset, length in reads)
    if len(pack.extents(0, 0)) == 1:
        assert len(reads) == 3


class Gate:
    """Holds every read until opened, and knows the most that waited at once."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.blocks: set[int] = set()

    def __call__(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.blocks.add(offset // BLOCK)
        assert self.opened.wait(60)
        return pread_into(fd, buffer, offset)


def test_no_more_than_stage_slots_blocks_are_in_flight(tmp_path: Path) -> None:
    pack, gate, ended = FakePack(tmp_path / "pack", 6, BLOCK), Gate(), SimpleQueue[Any]()
    with open_reader(pack, stage_slots=2, read_splits=4, pread=gate) as (reader, _):
        for expert in range(6):
            reader.submit(0, expert, aligned_buffer(BLOCK), ended.put)
        with pytest.raises(Empty):
            ended.get(timeout=0.2)
        assert gate.blocks == {0, 1}
        gate.opened.set()
        assert [ended.get(timeout=60) for _ in range(6)] == [None] * 6
    assert gate.blocks == set(range(6))


def test_close_waits_for_everything_and_may_be_repeated(tmp_path: Path) -> None:
    pack, gate, ended = FakePack(tmp_path / "pack", 6, BLOCK), Gate(), SimpleQueue[Any]()
    fds_before = n_open_files()
    reader = Reader(pack, stage_slots=2, pread=gate)
    for expert in range(6):
        reader.submit(0, expert, aligned_buffer(BLOCK), ended.put)
    closers = [threading.Thread(target=reader.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    assert ended.empty()
    gate.opened.set()
    for closer in closers:
        closer.join(60)
        assert not closer.is_alive()
    assert ended.qsize() == 6
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


@pytest.mark.parametrize("verify", ["first", "every"])
def test_a_flipped_bit_is_found_and_read_again(tmp_path: Path, verify: str) -> None:
    pack = FakePack(tmp_path / "pack", 3, BLOCK)
    with open_reader(pack, verify=verify, pread=Faults(lambda n, o: None, flip_at={2})) as (reader, counters):
        assert read(reader, pack, [0, 1, 2]) == [None] * 3
    stats = counters.snapshot()
    assert (stats.io_errors, stats.io_retries) == (1, 1)


def test_when_checksums_are_looked_at(tmp_path: Path) -> None:
    for verify, n_seen in (("off", 0), ("first", 0), ("every", 1)):
        pack = FakePack(tmp_path / verify, 1, 4096)
        flips = {1} if verify == "off" else {2}
        faults = Faults(lambda n, offset: None, flip_at=flips)
        with open_reader(pack, verify=verify, pread=faults, retries=0) as (reader, counters):
            ended: SimpleQueue[ReadError | None] = SimpleQueue()
            for _ in range(2):
                reader.submit(0, 0, aligned_buffer(4096), ended.put)
                ended.get(timeout=60)
        assert counters.snapshot().io_errors == n_seen, verify


def test_a_failed_first_check_does_not_count_as_the_first(tmp_path: Path) -> None:
    pack = FakePack(tmp_path / "pack", 1, 4096)
    with open_reader(pack, pread=Faults(lambda n, o: None, flip_at={1, 2}), retries=0) as (reader, _):
        for _ in range(2):
            (error,) = read(reader, pack, [0])
            assert error is not None and "checksum" in str(error)
        assert read(reader, pack, [0]) == [None]


@pytest.mark.parametrize("retries", [0, 3])
def test_a_bad_expert_fails_alone_after_all_retries(pack: FakePack, retries: int) -> None:
    first, last = pack.extents(0, 3)[0], pack.extents(0, 3)[-1]

    def fault(n: int, offset: int) -> int | None:  # pages that no neighbour reaches into
        if first.offset <= offset < last.offset + last.length - 4096:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return None

    options = {"retries": retries, "read_splits": 2, "stage_slots": 12}
    with open_reader(pack, pread=Faults(fault), **options) as (reader, counters):
        results = [read(reader, pack, [expert])[0] for expert in range(6)]
        assert read(reader, pack, [0, 1, 2, 4, 5]) == [None] * 5
    assert [i for i, error in enumerate(results) if error is not None] == [3]
    error = results[3]
    assert isinstance(error, ReadError) and error.errno == errno.EIO
    assert str(error) == f"{pack.files[0]}: expert 3 of layer 0 could not be read: Input/output error"
    stats = counters.snapshot()
    assert stats.io_errors > 0
    assert stats.io_errors * retries == stats.io_retries * (retries + 1), "all but the last failures are retried"


def test_a_damaged_file_names_expert_and_checksums(pack: FakePack) -> None:
    extent = pack.extents(0, 4)[0]
    with open(pack.files[0], "r+b") as file:
        file.seek(extent.offset + 1000)
        file.write(bytes(64))
    with open_reader(pack, retries=2) as (reader, counters):
        results = read(reader, pack, list(range(6)))
    assert [i for i, error in enumerate(results) if error is not None] == [4]
    assert pack.digest(0, 4).hex() in str(results[4]) and "expert 4 of layer 0" in str(results[4])
    assert isinstance(results[4], ReadError) and results[4].errno == 0
    stats = counters.snapshot()
    assert (stats.io_errors, stats.io_retries) == (3, 2)


def test_a_truncated_file(pack: FakePack) -> None:
    os.truncate(pack.files[0], pack.extents(0, 5)[0].offset + 5000)
    with open_reader(pack, retries=1) as (reader, _):
        results = read(reader, pack, list(range(6)))
    assert [i for i, error in enumerate(results) if error is not None] == [5]
    assert "expected" in str(results[5]) and "found" in str(results[5])


def test_a_callback_that_raises_or_submits_harms_nobody(pack: FakePack, caplog: pytest.LogCaptureFixture) -> None:
    ended: SimpleQueue[Any] = SimpleQueue()

    def again(error: ReadError | None) -> None:
        reader.submit(0, 1, aligned_buffer(BLOCK), ended.put)
        raise ValueError("mine")

    with open_reader(pack, stage_slots=1) as (reader, _):
        reader.submit(0, 0, aligned_buffer(BLOCK), again)
        assert ended.get(timeout=60) is None
    assert "was not handled" in caplog.text


def test_a_broken_pread_ends_as_an_error_too(pack: FakePack) -> None:
    def broken(n: int, offset: int) -> int | None:
        raise ZeroDivisionError("bug")

    with open_reader(pack, pread=Faults(broken), retries=0) as (reader, _):
        (error,) = read(reader, pack, [0])
    assert error is not None and str(error).endswith("could not be read: bug")


# ---- what cannot work is refused


@pytest.mark.parametrize("direct_io", [True, False])
def test_large_reads_that_are_refused_hint_at_direct_io(tmp_path: Path, direct_io: bool) -> None:
    """Opening and the trial read of a page went well."""
    pack = FakePack(tmp_path / "pack", 1, BLOCK)

    def refuse(fd: int, buffer: memoryview, offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with open_reader(pack, direct_io=direct_io, retries=0, pread=refuse) as (reader, _):
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
        pack = FakePack(folder / "pack", 2, 8192)
        with pytest.raises(DirectIOError, match="expert_direct_io=False"):
            Reader(pack)
        with open_reader(pack, direct_io=False) as (reader, counters):
            assert read(reader, pack, [0, 1]) == [None, None]
        assert counters.snapshot().fallbacks == 2
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    "options",
    [
        {"read_splits": 0},
        {"stage_slots": 0},
        {"stage_slots": 1.5},
        {"retries": -1},
        {"read_splits": True},
        {"read_splits": 2**31},
        {"stage_slots": 1025},
        {"verify": "always"},
    ],
    ids=repr,
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any]) -> None:
    pack = FakePack(tmp_path / "pack", 1, 4096)
    with pytest.raises(UsageError, match=next(iter(options))):
        Reader(pack, **options)


def test_a_reader_that_gets_no_more_threads_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = FakePack(tmp_path / "pack", 1, 4096)
    n_threads, n_files = threading.active_count(), n_open_files()
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Reader(pack)
    assert (threading.active_count(), n_open_files()) == (n_threads, n_files)


def test_wrong_destinations_and_experts(tmp_path: Path) -> None:
    pack = FakePack(tmp_path / "pack", 2, 8192)
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
            with pytest.raises(ValueError, match="no expert"):
                reader.submit(layer, expert, aligned_buffer(8192), called.append)
    assert called == []


@pytest.mark.parametrize(
    "extent",
    [
        Extent(0, 0, 8193, 0),
        Extent(0, 0, 4096, 4097),
        Extent(1, 0, 8192, 0),
        Extent(0, -4096, 8192, 0),
        Extent(0, 0, 0, 0),
        Extent(0, 0, 4096, -1),
    ],
)
def test_extents_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extent: Extent) -> None:
    pack = FakePack(tmp_path / "pack", 2, 8192)
    called: list[Any] = []
    with open_reader(pack) as (reader, _):
        monkeypatch.setattr(pack, "extents", lambda layer, expert: (extent,))
        with pytest.raises(PackError, match="expert 1 of layer 0 does not fit"):
            reader.submit(0, 1, aligned_buffer(8192), called.append)
    assert called == []


@pytest.mark.parametrize("n_parts", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("pieces", [[(BLOCK, 0)], INDEX_PIECES, [(1, 0), (1, 1), (4096, 2)]])
def test_parts_cover_the_extents_once(pieces: list[tuple[int, int]], n_parts: int) -> None:
    extents = [Extent(i % 2, i * (8 * MIB + 7777), *piece) for i, piece in enumerate(pieces)]
    parts = _cut(extents, n_parts)
    assert 1 <= len(parts) <= n_parts
    found = sorted((s.file_id, s.offset, s.length, s.dest_offset) for part in parts for s in part)
    joined: list[tuple[int, int, int, int]] = []
    for file_id, offset, length, dest in found:
        last = joined[-1] if joined else (-1, 0, 0, 0)
        if last[0] == file_id and last[1] + last[2] == offset and last[3] + last[2] == dest:
            assert offset % 4096 == 0, "cut where two direct reads do not overlap"
            joined[-1] = (file_id, last[1], last[2] + length, last[3])
        else:
            joined.append((file_id, offset, length, dest))
    assert joined == sorted((e.file_id, e.offset, e.length, e.dest_offset) for e in extents)


def test_a_striped_pack_reads_from_all_its_files(tmp_path: Path) -> None:
    class Striped(FakePack):
        def extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
            (whole,) = super().extents(layer, expert)
            half = whole.length // 2
            return (
                Extent(0, whole.offset, half, 0),
                Extent(1, whole.offset + half, whole.length - half, half),
            )

    pack = Striped(tmp_path / "a", 3, 4 * 4096)
    pack.files.append(tmp_path / "b")
    contents = pack.files[0].read_bytes()
    pack.files[1].write_bytes(contents)
    pack.layers = [Layer(0, 0, "exps", 3, 0, 4 * 4096, ())]
    with open_reader(pack) as (reader, _):
        assert read(reader, pack, [0, 1, 2]) == [None] * 3
