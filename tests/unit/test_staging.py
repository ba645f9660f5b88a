from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from llama_expert_pack.pypack.drive.direct_io import PreadInto, aligned_buffer, pread_into
from llama_expert_pack.pypack.drive.reader import Reader
from llama_expert_pack.pypack.drive.staging import StagingPool
from llama_expert_pack.pypack.errors import ReadError
from llama_expert_pack.pypack.stats.counters import Counters
from tests.unit.fake_pack import FakePack

MIB = 1 << 20
BLOCK = 3 * MIB + 4096
N_EXPERT = 9


class Device:
    """Memory that only copies reach; starts as garbage, as a slot that held another expert."""

    def __init__(self) -> None:
        self.slots = [b"\xee" * BLOCK for _ in range(N_EXPERT)]
        self.ended: SimpleQueue[tuple[int, ReadError | None]] = SimpleQueue()
        self.is_gone = False

    def submit(self, pool: StagingPool, expert: int) -> None:
        def deliver(block: memoryview) -> None:
            if self.is_gone:
                raise ReadError("the device is gone")
            self.slots[expert] = bytes(block)

        pool.submit(0, expert, deliver, lambda error: self.ended.put((expert, error)))

    def results(self, n: int) -> dict[int, ReadError | None]:
        return dict(self.ended.get(timeout=30) for _ in range(n))


def make_pool(
    pack: FakePack, n_buffers: int, pread: PreadInto = pread_into, **options: object
) -> tuple[Reader, StagingPool]:
    reader = Reader(pack, counters=Counters(), stage_slots=n_buffers, pread=pread, **options)  # type: ignore[arg-type]
    return reader, StagingPool(reader, pack.layers, [aligned_buffer(BLOCK) for _ in range(n_buffers)])


@pytest.mark.parametrize("n_buffers", [1, 2, 12])
def test_every_block_arrives_whole_through_few_buffers(n_buffers: int, tmp_path: Path) -> None:
    pack = FakePack(tmp_path / "pack", N_EXPERT, BLOCK)
    device = Device()
    reader, pool = make_pool(pack, n_buffers)
    for expert in range(N_EXPERT):
        device.submit(pool, expert)
    assert device.results(N_EXPERT) == dict.fromkeys(range(N_EXPERT))
    reader.close()
    assert device.slots == pack.blocks


def test_a_failed_copy_fails_its_expert_only_and_frees_the_buffer(tmp_path: Path) -> None:
    pack = FakePack(tmp_path / "pack", N_EXPERT, BLOCK)
    device = Device()
    reader, pool = make_pool(pack, 1)
    device.is_gone = True
    device.submit(pool, 0)
    results = device.results(1)
    device.is_gone = False
    device.submit(pool, 1)
    results |= device.results(1)
    reader.close()
    assert "the device is gone" in str(results[0])
    assert results[1] is None and device.slots[1] == pack.blocks[1]


def test_a_corrupt_read_is_not_delivered(tmp_path: Path) -> None:
    pack = FakePack(tmp_path / "pack", N_EXPERT, BLOCK)
    device = Device()
    lock, n_reads = threading.Lock(), 0

    def flip_first(fd: int, buffer: memoryview, offset: int) -> int:
        nonlocal n_reads
        done = pread_into(fd, buffer, offset)
        with lock:
            n_reads += 1
            if n_reads == 1:
                buffer[done // 2] ^= 1
        return done

    reader, pool = make_pool(pack, 2, flip_first, verify="every", retries=0)
    device.submit(pool, 3)
    assert "checksum" in str(device.results(1)[3])
    assert set(device.slots[3]) == {0xEE}, "nothing was copied"
    device.submit(pool, 3)
    assert device.results(1) == {3: None}
    reader.close()
    assert device.slots[3] == pack.blocks[3]


def test_after_close_every_request_is_answered(tmp_path: Path) -> None:
    pack = FakePack(tmp_path / "pack", N_EXPERT, BLOCK)
    device = Device()
    reader, pool = make_pool(pack, 1)
    reader.close()
    device.submit(pool, 0)
    device.submit(pool, 1)
    assert all("could not start" in str(error) for error in device.results(2).values())
