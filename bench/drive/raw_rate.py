"""What the drive gives by itself: blocks of the pack, at random, with O_DIRECT; and the same with a copy to the GPU.

These are the limits that measured rates stand beside, so they are measured in the same run, on the same file, with
the same block size; in a process of its own, which gives the GPU back:

    python -m bench.drive.raw_rate PACK READ_SPLITS STAGE_SLOTS [--gpu]       prints JSON
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from bench.drive.programs import compiled, output
from lab.stock import ROOT, environment
from llama_expert_pack.pypack.errors import ExpertPackError, UsageError
from llama_expert_pack.pypack.format.pack import Pack, open_pack

STEP = 7919  # a prime: visits every block once, far from the one before
ROUND_BYTES = 3_000_000_000  # read in one measurement, at most
PART_BYTES_MIN, COPY_BYTES_MIN = 512 << 10, 256 << 10  # of native's reads, the latter for a GPU; raw_burst.c's too
BURSTS = (1, 2, 3, 4, 6, 8, 12)  # blocks asked for at once, as a layer does


class Gpu:
    """Page-locked buffers and copies to device memory, through the CUDA driver alone."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuInit", 0)
        self._check("cuDeviceGet", ctypes.byref(device), 0)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.use()

    def _check(self, name: str, *args: Any) -> None:
        if status := getattr(self._cuda, name)(*args):
            raise OSError(f"{name} failed with CUDA error {status}")

    def use(self) -> None:
        """To be called in each thread that copies."""
        self._check("cuCtxSetCurrent", self._context)

    def page_locked(self, n_bytes: int) -> memoryview:
        place = ctypes.c_void_p()
        self._check("cuMemHostAlloc", ctypes.byref(place), ctypes.c_size_t(n_bytes), 0)
        return memoryview((ctypes.c_uint8 * n_bytes).from_address(place.value or 0)).cast("B")

    def memory(self, n_bytes: int) -> int:
        place = ctypes.c_uint64()
        self._check("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(n_bytes))
        return place.value

    def copy(self, target: int, source: memoryview) -> None:
        """Returns when the bytes are on the device."""
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(source))
        self._check("cuMemcpyHtoD_v2", ctypes.c_uint64(target), ctypes.c_void_p(address), ctypes.c_size_t(len(source)))


def read_threads(gpu: bool) -> int:
    """As native: for a GPU they poll where cores are plenty, which leaves one of these to the thread that feeds it."""
    n_cores = len(os.sched_getaffinity(0))
    return min(16, n_cores - 1) if gpu and n_cores >= 8 else 16


def wave_blocks(pack: Pack, read_splits: int, gpu: bool) -> float:
    """Blocks whose parts are read at the same time."""
    n_parts = block_facts(pack)[0] // (COPY_BYTES_MIN if gpu else PART_BYTES_MIN)
    return read_threads(gpu) / min(read_splits, max(1, n_parts))


def block_facts(pack: Pack) -> tuple[int, int, int]:
    """Bytes of the pack's largest block, how many such blocks the file holds, and how many to read."""
    block_bytes = max(layer.block_bytes for layer in pack.layers)
    n_blocks = pack.header.file_bytes // block_bytes
    return block_bytes, n_blocks, max(1, min(n_blocks, ROUND_BYTES // block_bytes))


def raw_read_rates(pack: Pack, n_threads: int) -> list[float]:
    """Bytes/s of threads that read blocks and do nothing else, in two passes."""
    with tempfile.TemporaryDirectory() as folder:
        program = compiled("raw_read.c", Path(folder))
        return [output(program, pack.path, *block_facts(pack), n_threads, STEP)[0] for _ in range(2)]


def copy_rate(block_bytes: int, n: int = 100) -> float:
    """Bytes/s of copies from page-locked memory to the GPU, one block after the other."""
    gpu = Gpu()
    source, target = gpu.page_locked(block_bytes), gpu.memory(block_bytes)
    gpu.copy(target, source)
    start = time.perf_counter()
    for _ in range(n):
        gpu.copy(target, source)
    return n * block_bytes / (time.perf_counter() - start)


def raw_read_copy_rate(pack: Pack, n_threads: int) -> float:
    """Bytes/s of threads that read blocks into page-locked memory and copy them to the GPU."""
    gpu = Gpu()
    block_bytes, n_blocks, n_reads = block_facts(pack)
    fd = os.open(pack.path, os.O_RDONLY | os.O_DIRECT)
    numbers = count()
    buffers = [gpu.page_locked(block_bytes) for _ in range(n_threads)]
    targets = [gpu.memory(block_bytes) for _ in range(n_threads)]
    for buffer in buffers:
        buffer[:] = bytes(block_bytes)

    def work(i: int) -> None:
        gpu.use()
        while (number := next(numbers)) < n_reads:
            offset, done = number * STEP % n_blocks * block_bytes, 0
            while done < block_bytes:
                done += os.preadv(fd, [buffers[i][done:]], offset + done)
            gpu.copy(targets[i], buffers[i])

    with ThreadPoolExecutor(n_threads) as pool:
        start = time.perf_counter()
        for running in [pool.submit(work, i) for i in range(n_threads)]:
            running.result()
        duration_s = time.perf_counter() - start
    os.close(fd)
    return n_reads * block_bytes / duration_s


def burst_seconds(pack: Pack, read_splits: int, gpu: bool, n_repeats: int = 10) -> dict[int, float]:
    """Mean seconds until `k` blocks that are asked for at once are all in memory, for several `k`."""
    block_bytes, n_blocks, _ = block_facts(pack)
    sizes = (block_bytes, n_blocks, read_threads(gpu), read_splits, int(gpu))
    with tempfile.TemporaryDirectory() as folder:
        program = compiled("raw_burst.c", Path(folder))
        return dict(zip(BURSTS, output(program, pack.path, *sizes, n_repeats, STEP, *BURSTS), strict=True))


def measure(pack: Pack, read_splits: int, stage_slots: int, gpu: bool) -> dict[str, Any]:
    """All of the above; without what needs a GPU's driver where it cannot be loaded."""
    # a first pass over a file can be several times slower than the next: the limit is the better one
    passes = raw_read_rates(pack, stage_slots)
    found: dict[str, Any] = {"raw_bytes_per_s": max(passes), "raw_passes_bytes_per_s": passes}
    if gpu:
        with suppress(OSError):
            found["raw_copy_bytes_per_s"] = raw_read_copy_rate(pack, stage_slots)
            found["copy_bytes_per_s"] = copy_rate(block_facts(pack)[0])
    bursts = burst_seconds(pack, read_splits, gpu)
    found["burst_s"] = {str(k): seconds for k, seconds in bursts.items()}
    found["wave_blocks"] = wave_blocks(pack, read_splits, gpu)
    return found


def in_process(pack: Path, read_splits: int, stage_slots: int, gpu: bool) -> dict[str, Any]:
    """:func:`measure` in a process of its own, which gives the GPU back. Raises UsageError."""
    arguments = [str(pack), str(read_splits), str(stage_slots), *(["--gpu"] if gpu else [])]
    command = [sys.executable, "-m", "bench.drive.raw_rate", *arguments]
    run = subprocess.run(command, env=environment(stock=False), cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise UsageError(f"{pack}: the drive could not be measured: {run.stderr.strip()[-300:]}")
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    path, read_splits, stage_slots, *rest = sys.argv[1:]
    try:
        print(json.dumps(measure(open_pack(path), int(read_splits), int(stage_slots), rest == ["--gpu"])))
    except ExpertPackError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
