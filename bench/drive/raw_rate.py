"""What the drive gives by itself: blocks of the pack, at random, with O_DIRECT; and the same with a copy to the GPU.

These are the limits that measured rates stand beside, so they are measured in the same run, on the same file, with
the same block size; in a process of its own, which gives the GPU back:

    python -m bench.drive.raw_rate PACK READ_SPLITS STAGE_SLOTS [--gpu]       prints JSON
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from llama_expert_pack.pypack.drive.direct_io import aligned_buffer
from llama_expert_pack.pypack.drive.reader import Reader
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


def _compiled(name: str, arguments: Sequence[object]) -> list[float]:
    """The numbers that a C program of this folder prints, one a line."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / name
        source = Path(__file__).with_name(f"{name}.c")
        subprocess.run(["cc", "-O2", "-pthread", str(source), "-o", str(program)], check=True)
        run = subprocess.run([str(program), *map(str, arguments)], check=True, capture_output=True, text=True)
    return [float(line) for line in run.stdout.split()]


def raw_read_rate(pack: Pack, n_threads: int) -> float:
    """Bytes/s of threads that read blocks and do nothing else: raw_read.c, or Python's where there is no compiler."""
    if shutil.which("cc") is None:
        return _threads_rate(pack, n_threads, None)
    return _compiled("raw_read", (pack.path, *block_facts(pack), n_threads, STEP))[0]


def raw_read_copy_rate(pack: Pack, n_threads: int) -> float:
    """Bytes/s of threads that read blocks into page-locked memory and copy them to the GPU."""
    return _threads_rate(pack, n_threads, Gpu())


def copy_rate(block_bytes: int, n: int = 100) -> float:
    """Bytes/s of copies from page-locked memory to the GPU, one block after the other."""
    gpu = Gpu()
    source, target = gpu.page_locked(block_bytes), gpu.memory(block_bytes)
    gpu.copy(target, source)
    start = time.perf_counter()
    for _ in range(n):
        gpu.copy(target, source)
    return n * block_bytes / (time.perf_counter() - start)


def _threads_rate(pack: Pack, n_threads: int, gpu: Gpu | None) -> float:
    block_bytes, n_blocks, n_reads = block_facts(pack)
    fd = os.open(pack.path, os.O_RDONLY | os.O_DIRECT)
    numbers = count()
    buffers = [gpu.page_locked(block_bytes) if gpu else aligned_buffer(block_bytes) for _ in range(n_threads)]
    targets = [gpu.memory(block_bytes) if gpu else 0 for _ in range(n_threads)]
    for buffer in buffers:
        buffer[:] = bytes(block_bytes)

    def work(i: int) -> None:
        if gpu:
            gpu.use()
        while (number := next(numbers)) < n_reads:
            offset, done = number * STEP % n_blocks * block_bytes, 0
            while done < block_bytes:
                done += os.preadv(fd, [buffers[i][done:]], offset + done)
            if gpu:
                gpu.copy(targets[i], buffers[i])

    with ThreadPoolExecutor(n_threads) as pool:
        start = time.perf_counter()
        for running in [pool.submit(work, i) for i in range(n_threads)]:
            running.result()
        duration_s = time.perf_counter() - start
    os.close(fd)
    return n_reads * block_bytes / duration_s


def burst_seconds(pack: Pack, read_splits: int, stage_slots: int, gpu: bool, n_repeats: int = 10) -> dict[int, float]:
    """Mean seconds until `k` blocks that are asked for at once are all in memory, for several `k`: raw_burst.c, or the
    pack's reader where there is no compiler."""
    if shutil.which("cc") is None:
        return _reader_burst_seconds(pack, read_splits, stage_slots, n_repeats)
    block_bytes, n_blocks, _ = block_facts(pack)
    sizes = (block_bytes, n_blocks, read_threads(gpu), read_splits, int(gpu))
    arguments = (pack.path, *sizes, n_repeats, STEP, *BURSTS)
    return dict(zip(BURSTS, _compiled("raw_burst", arguments), strict=True))


def _reader_burst_seconds(pack: Pack, read_splits: int, stage_slots: int, n_repeats: int) -> dict[int, float]:
    keys = [(layer.index, expert) for layer in pack.layers for expert in range(layer.n_expert)]
    order = iter(np.resize(np.random.default_rng(11).permutation(len(keys)), sum(BURSTS) * n_repeats))
    buffers = [aligned_buffer(max(layer.block_bytes for layer in pack.layers)) for _ in range(max(BURSTS))]
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    reader = Reader(pack, read_splits=read_splits, stage_slots=stage_slots, verify="off")
    found: dict[int, float] = {}
    for k in BURSTS:
        times = []
        for _ in range(n_repeats):
            ended: SimpleQueue[Exception | None] = SimpleQueue()
            start = time.perf_counter()
            for buffer in buffers[:k]:
                layer, expert = keys[next(order)]
                reader.submit(layer, expert, buffer[: pack.layers[layer].block_bytes], ended.put)
            for _ in range(k):
                if error := ended.get():
                    raise error
            times.append(time.perf_counter() - start)
        found[k] = statistics.fmean(times)
    reader.close()
    return found


def measure(pack: Pack, read_splits: int, stage_slots: int, gpu: bool) -> dict[str, Any]:
    """All of the above; without what needs a GPU's driver where it cannot be loaded."""
    # a first pass over a file can be several times slower than the next: the limit is the better one
    passes = [raw_read_rate(pack, stage_slots) for _ in range(2)]
    found: dict[str, Any] = {"raw_bytes_per_s": max(passes), "raw_passes_bytes_per_s": passes}
    if gpu:
        with suppress(OSError):
            found["raw_copy_bytes_per_s"] = raw_read_copy_rate(pack, stage_slots)
            found["copy_bytes_per_s"] = copy_rate(block_facts(pack)[0])
    bursts = burst_seconds(pack, read_splits, stage_slots, gpu)
    found["burst_s"] = {str(k): seconds for k, seconds in bursts.items()}
    found["wave_blocks"] = wave_blocks(pack, read_splits, gpu)
    return found


def main() -> None:
    path, read_splits, stage_slots, *rest = sys.argv[1:]
    print(json.dumps(measure(open_pack(path), int(read_splits), int(stage_slots), rest == ["--gpu"])))


if __name__ == "__main__":
    main()
