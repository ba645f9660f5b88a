"""How near the reader comes to the drive: its GB/s beside those of C threads, and the cost of a small read.

    python bench/drive/reader_bandwidth.py FOLDER [--out results.jsonl]

Writes a file into FOLDER, then alternates, round by round, between raw_read.c and llama_expert_pack.pypack.drive.reader.Reader: the
same blocks in the same order, as many blocks in flight, O_DIRECT. The result is the median of the rounds.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import click
import xxhash

from bench.banner import banner, report
from llama_expert_pack.pypack.drive.direct_io import aligned_buffer
from llama_expert_pack.pypack.drive.reader import Reader
from llama_expert_pack.pypack.errors import ReadError
from llama_expert_pack.pypack.format.layout import Extent, Layer
from llama_expert_pack.pypack.values.options import Verify

STEP = 7919  # a prime: visits every block once, far from the one before


class BlockFile:
    """A file of equal blocks, seen as a pack of one layer."""

    def __init__(self, path: Path, block_bytes: int, n_blocks: int) -> None:
        self.files = [path]
        self.layers = [Layer(0, 0, "exps", n_blocks, 0, block_bytes, ())]
        self._digests: dict[int, bytes] = {}

    def extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        block_bytes = self.layers[layer].block_bytes
        return (Extent(0, expert * block_bytes, block_bytes, 0),)

    def digest(self, layer: int, expert: int) -> bytes:
        if expert not in self._digests:
            block_bytes = self.layers[layer].block_bytes
            with open(self.files[0], "rb") as file:
                file.seek(expert * block_bytes)
                self._digests[expert] = xxhash.xxh3_128_digest(file.read(block_bytes))
        return self._digests[expert]


@contextmanager
def block_file(folder: Path, block_bytes: int, n_blocks: int) -> Iterator[BlockFile]:
    with tempfile.NamedTemporaryFile(dir=folder, prefix="reader-bandwidth-") as file:
        for _ in range(n_blocks):
            file.write(os.urandom(block_bytes))
        file.flush()
        os.fsync(file.fileno())
        yield BlockFile(Path(file.name), block_bytes, n_blocks)


def raw_bytes_per_s(program: Path, pack: BlockFile, n_reads: int, n_threads: int) -> float:
    layer = pack.layers[0]
    numbers = (layer.block_bytes, layer.n_expert, n_reads, n_threads, STEP)
    command = [str(program), str(pack.files[0]), *map(str, numbers)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def reader_bytes_per_s(reader: Reader, pack: BlockFile, n_reads: int, buffers: list[memoryview]) -> float:
    layer = pack.layers[0]
    free: SimpleQueue[memoryview | ReadError] = SimpleQueue()

    def give_back(buffer: memoryview) -> Callable[[ReadError | None], None]:
        return lambda error: free.put(error or buffer)

    def take() -> memoryview:
        got = free.get()
        if isinstance(got, ReadError):
            raise got
        return got

    for buffer in buffers:
        free.put(buffer)
    start = time.perf_counter()
    for i in range(n_reads):
        buffer = take()
        reader.submit(0, i * STEP % layer.n_expert, buffer, give_back(buffer))
    for _ in buffers:
        take()
    return n_reads * layer.block_bytes / (time.perf_counter() - start)


def small_read_us(pack: BlockFile, n: int) -> dict[str, float]:
    """Median microseconds of one preadv alone, and from submit to on_done, for the same 4 KiB blocks."""
    reader = Reader(pack, verify="off")
    buffer = aligned_buffer(pack.layers[0].block_bytes)
    ended: SimpleQueue[ReadError | None] = SimpleQueue()
    fd = os.open(pack.files[0], os.O_RDONLY | os.O_DIRECT)
    alone, through = [], []
    for i in range(n):
        expert = i * STEP % pack.layers[0].n_expert
        start = time.perf_counter()
        os.preadv(fd, [buffer], expert * pack.layers[0].block_bytes)
        alone.append(time.perf_counter() - start)
        start = time.perf_counter()
        reader.submit(0, expert, buffer, ended.put)
        error = ended.get()
        through.append(time.perf_counter() - start)
        if error is not None:
            raise error
    os.close(fd)
    reader.close()
    return {
        "preadv_us": round(statistics.median(alone) * 1e6, 1),
        "submit_to_done_us": round(statistics.median(through) * 1e6, 1),
    }


def cpu_s(whose: int) -> float:
    usage = resource.getrusage(whose)
    return usage.ru_utime + usage.ru_stime


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--block-bytes", default=13_369_344, show_default=True)
@click.option("--n-blocks", default=192, show_default=True)
@click.option("--n-reads", default=192, show_default=True, help="Blocks read in a round.")
@click.option("--rounds", default=6, show_default=True)
@click.option("--stage-slots", default=12, show_default=True, help="Blocks in flight; C threads.")
@click.option("--read-splits", default=4, show_default=True)
@click.option("--verify", default="off", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Append the result as JSON.")
def main(
    folder: Path,
    block_bytes: int,
    n_blocks: int,
    n_reads: int,
    rounds: int,
    stage_slots: int,
    read_splits: int,
    verify: Verify,
    out: Path | None,
) -> None:
    with tempfile.TemporaryDirectory() as build:
        program = Path(build) / "raw_read"
        source = Path(__file__).with_name("raw_read.c")
        subprocess.run(["cc", "-O2", "-pthread", str(source), "-o", str(program)], check=True)
        raw, ours = [], []
        raw_cpu_s = ours_cpu_s = 0.0
        with block_file(folder, block_bytes, n_blocks) as pack:
            reader = Reader(pack, read_splits=read_splits, stage_slots=stage_slots, verify=verify)
            buffers = [aligned_buffer(block_bytes) for _ in range(stage_slots)]
            for buffer in buffers:
                buffer[:] = bytes(block_bytes)
            if verify != "off":
                for expert in range(n_blocks):
                    pack.digest(0, expert)
            for i in range(2 * rounds):
                if i % 4 in (0, 3):  # a drive may cache: who reads first changes from round to round
                    before = cpu_s(resource.RUSAGE_CHILDREN)
                    raw.append(raw_bytes_per_s(program, pack, n_reads, stage_slots) / 1e9)
                    raw_cpu_s += cpu_s(resource.RUSAGE_CHILDREN) - before
                else:
                    before = cpu_s(resource.RUSAGE_SELF)
                    ours.append(reader_bytes_per_s(reader, pack, n_reads, buffers) / 1e9)
                    ours_cpu_s += cpu_s(resource.RUSAGE_SELF) - before
            reader.close()
        with block_file(folder, 4096, 4096) as small:
            latency = small_read_us(small, 2000)
    result = {
        "bench": "reader_bandwidth",
        **banner(folder),
        "block_bytes": block_bytes,
        "n_blocks": n_blocks,
        "n_reads": n_reads,
        "stage_slots": stage_slots,
        "read_splits": read_splits,
        "verify": verify,
        "raw_gb_per_s": [round(x, 3) for x in raw],
        "reader_gb_per_s": [round(x, 3) for x in ours],
        "raw_cpu_s_per_gb": round(raw_cpu_s / (rounds * n_reads * block_bytes / 1e9), 3),
        "reader_cpu_s_per_gb": round(ours_cpu_s / (rounds * n_reads * block_bytes / 1e9), 3),
        "reader_to_raw": round(statistics.median(ours) / statistics.median(raw), 3),
        **latency,
    }
    report(result, out)


if __name__ == "__main__":
    main()
