"""How near native's reading comes to the drive: its GB/s beside those of C threads, and the cost of a small read.

    python -m bench.drive.native_rate FOLDER [--out results.jsonl]

Writes a file into FOLDER, then alternates, round by round, between raw_read.c and native_read.cpp, which is the reading
of the library that was built: the same blocks in the same order, as many in flight, O_DIRECT. The result is the median
of the rounds.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench.banner import banner, report
from bench.drive.programs import compiled, output
from bench.drive.raw_rate import STEP
from lab.stock import ROOT
from llama_expert_pack.bridge.library import library_dir
from llama_expert_pack.pypack.errors import ExpertPackError

SMALL_BYTES, N_SMALL = 4096, 4096


class Programs(NamedTuple):
    raw: Path
    native: Path


def compile_both(folder: Path) -> Programs:
    """Raises ExpertPackError without a compiler or the library."""
    (header,) = (ROOT / "native" / "src").rglob("expert_read.h")
    library = library_dir() / "libggml-base.so"
    options = ["-std=c++17", f"-I{header.parent}", str(library), f"-Wl,-rpath,{library.parent}"]
    return Programs(compiled("raw_read.c", folder), compiled("native_read.cpp", folder, *options))


@contextmanager
def block_file(folder: Path, block_bytes: int, n_blocks: int) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(dir=folder, prefix="native-rate-") as file:
        for _ in range(n_blocks):
            file.write(os.urandom(block_bytes))
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


class Rates:
    """Of one side, round by round."""

    def __init__(self, program: Path, *arguments: object) -> None:
        self.program, self.arguments = program, arguments
        self.bytes_per_s: list[float] = []
        self.cpu_s = 0.0

    def measure(self) -> None:
        before = cpu_s()
        self.bytes_per_s += output(self.program, *self.arguments)
        self.cpu_s += cpu_s() - before

    @property
    def gb_per_s(self) -> list[float]:
        return [round(rate / 1e9, 3) for rate in self.bytes_per_s]


def cpu_s() -> float:
    """Seconds of processor time of programs that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def in_turn(raw: Rates, native: Rates, rounds: int) -> float:
    """Measures both; the ratio of their medians."""
    for i in range(2 * rounds):
        (raw if i % 4 in (0, 3) else native).measure()  # a drive may cache: who reads first changes from round to round
    return statistics.median(native.bytes_per_s) / statistics.median(raw.bytes_per_s)


def small_read_us(programs: Programs, folder: Path) -> dict[str, float]:
    """Microseconds of a read of 4 KiB, one after the other: by one thread alone, and by native's threads."""
    with block_file(folder, SMALL_BYTES, N_SMALL) as file:
        common = (file, SMALL_BYTES, N_SMALL, N_SMALL, 1, STEP)
        raw, native = Rates(programs.raw, *common), Rates(programs.native, *common, 1, 0)
        in_turn(raw, native, 3)
    sides = {"small_raw_us": raw, "small_native_us": native}
    return {name: round(SMALL_BYTES / statistics.median(side.bytes_per_s) * 1e6, 1) for name, side in sides.items()}


def measure(folder: Path, rounds: int, **o: Any) -> dict[str, Any]:
    """The options of :func:`main`, and what was found."""
    with tempfile.TemporaryDirectory() as build:
        programs = compile_both(Path(build))
        with block_file(folder, o["block_bytes"], o["n_blocks"]) as file:
            common = (file, o["block_bytes"], o["n_blocks"], o["n_reads"], o["stage_slots"], STEP)
            raw = Rates(programs.raw, *common)
            native = Rates(programs.native, *common, o["read_splits"], int(o["hashed"]))
            ratio = in_turn(raw, native, rounds)
        latency = small_read_us(programs, folder)
    gb = rounds * o["n_reads"] * o["block_bytes"] / 1e9
    return {
        **o,
        "raw_gb_per_s": raw.gb_per_s,
        "native_gb_per_s": native.gb_per_s,
        "raw_cpu_s_per_gb": round(raw.cpu_s / gb, 3),
        "native_cpu_s_per_gb": round(native.cpu_s / gb, 3),
        "native_to_raw": round(ratio, 3),
        **latency,
    }


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--block-bytes", default=13_369_344, show_default=True)
@click.option("--n-blocks", default=192, show_default=True)
@click.option("--n-reads", default=192, show_default=True, help="Blocks read in a round.")
@click.option("--rounds", default=6, show_default=True)
@click.option("--stage-slots", default=12, show_default=True, help="Blocks in flight; C threads.")
@click.option("--read-splits", default=64, show_default=True, help="Parts of a block at most, of native's.")
@click.option("--hashed/--no-hashed", default=False, show_default=True, help="Native computes checksums, too.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Append the result as JSON.")
def main(folder: Path, rounds: int, out: Path | None, **options: Any) -> None:
    try:
        found = measure(folder, rounds, **options)
    except ExpertPackError as error:
        sys.exit(str(error))
    report({"bench": "native_rate", **banner(folder), **found}, out)


if __name__ == "__main__":
    main()
