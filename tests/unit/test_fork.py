"""What a forked child has of its parent's readers, buffers and files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from llama_expert_pack.pypack.drive.direct_io import aligned_buffer, pread_into
from llama_expert_pack.pypack.drive.reader import Reader
from llama_expert_pack.pypack.errors import ReadError, UsageError
from llama_expert_pack.pypack.stats.counters import Counter, Counters
from llama_expert_pack.pypack.stats.stats_file import StatsWriter
from tests.forking import status_of_child
from tests.unit.fake_pack import fake_pack

pytestmark = pytest.mark.timeout(200)
BLOCK = 64 << 10


def test_a_reader_with_reads_under_way(tmp_path: Path) -> None:
    go_on = threading.Event()

    def pread(fd: int, buffer: memoryview, offset: int) -> int:
        go_on.wait(100)
        return pread_into(fd, buffer, offset)

    pack = fake_pack(tmp_path / "pack", 3, BLOCK)
    reader = Reader(pack, direct_io=False, pread=pread)
    buffers = [aligned_buffer(BLOCK) for _ in range(3)]
    errors: list[ReadError | None] = []
    for expert, buffer in enumerate(buffers):
        reader.submit(0, expert, buffer, errors.append)

    def child() -> None:
        with pytest.raises(UsageError, match="forked"):
            reader.submit(0, 0, buffers[0], errors.append)
        reader.close()
        reader.close()
        own = Reader(pack, direct_io=False)
        done = threading.Event()
        own.submit(0, 1, buffers[1], lambda error: done.set())
        assert done.wait(50) and bytes(buffers[1]) == pack.blocks[1]
        own.close()

    assert status_of_child(child) == 0
    go_on.set()
    reader.close()
    assert errors == [None] * 3 and [bytes(buffer) for buffer in buffers] == pack.blocks


def test_a_buffer_is_not_shared() -> None:
    """A page that both have is copied at the next write, and a direct read under way lands in one of the two."""
    buffer = aligned_buffer(8192)
    buffer[:] = b"\xff" * 8192

    def child() -> None:
        assert bytes(buffer) == bytes(8192)
        buffer[:] = b"\x01" * 8192

    assert status_of_child(child) == 0
    assert bytes(buffer) == b"\xff" * 8192


def test_a_statistics_file_is_the_parents(tmp_path: Path) -> None:
    counters, path = Counters(), tmp_path / "stats.json"
    writer = StatsWriter(path, 1e6, counters.snapshot)
    before = path.read_bytes()
    counters.add(Counter.EVICTIONS)
    event: Any = writer._closing
    with event._cond:  # as if its thread were looking just now
        assert status_of_child(writer.close) == 0
    assert path.read_bytes() == before
    writer.close()
    assert path.read_bytes() != before
