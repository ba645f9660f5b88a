"""How fast the converter is beside a plain O_DIRECT copy of as many bytes on the same disk.

    python -m bench.drive.convert_speed MODEL FOLDER [--out results.jsonl]

Alternates, round by round, between a copy and a conversion of MODEL into FOLDER; both end with an fsync, both
have as many transfers in flight into reserved room, and neither leaves anything behind. The
conversion includes hashes, index and manifest, but not the start of Python. The result is the median of the rounds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import click

from bench.banner import banner, report
from llama_expert_pack.pypack.drive.direct_io import aligned_buffer
from llama_expert_pack.pypack.format.layout import ALIGNMENT

PIECE_BYTES = 16 << 20


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_DIRECT, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def copy_s(model: Path, target: Path, size_bytes: int, jobs: int) -> float:
    """Seconds to copy ``size_bytes`` (whole pages) of the model."""
    local = threading.local()

    def copy(offset: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = aligned_buffer(PIECE_BYTES)
        piece = local.buffer[: min(PIECE_BYTES, size_bytes - offset)]
        if os.preadv(source, [piece], offset) != len(piece) or os.pwrite(sink, piece, offset) != len(piece):
            raise OSError(f"short transfer at {offset}")

    start = time.perf_counter()
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    with opened(model, os.O_RDONLY) as source, opened(target, flags) as sink, ThreadPoolExecutor(jobs) as pool:
        os.posix_fallocate(sink, 0, size_bytes)
        list(pool.map(copy, range(0, size_bytes, PIECE_BYTES)))
        os.fsync(sink)
    return time.perf_counter() - start


def convert_s(model: Path, folder: Path, jobs: int) -> tuple[float, int, int]:
    """Seconds, resident KiB at most, and bytes of the pack."""
    code = (
        "import sys, time; from llama_expert_pack.pypack.convert.convert import convert\n"
        "start = time.perf_counter(); done = convert(sys.argv[1], sys.argv[2], jobs=int(sys.argv[3]))\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "resident_kib = int(status['VmHWM'].split()[0])\n"
        "print(time.perf_counter() - start, resident_kib, done.pack_bytes)"
    )
    command = [sys.executable, "-c", code, str(model), str(folder), str(jobs)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    duration_s, resident_kib, pack_bytes = out.split()
    return float(duration_s), int(resident_kib), int(pack_bytes)


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=4, show_default=True)
@click.option("--jobs", default=4, show_default=True, help="Transfers in flight, of both.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Append the result as JSON.")
def main(model: Path, folder: Path, rounds: int, jobs: int, out: Path | None) -> None:
    copies, conversions, resident_kib = [], [], 0
    pack_bytes = 0  # the first round is a conversion
    for i in range(2 * rounds):
        with tempfile.TemporaryDirectory(dir=folder, prefix="convert-speed-") as place:
            os.sync()
            if i % 4 in (0, 3):  # who comes first changes from round to round
                duration_s, resident, pack_bytes = convert_s(model, Path(place), jobs)
                conversions.append(pack_bytes / duration_s / 1e6)
                resident_kib = max(resident_kib, resident)
            else:
                n_bytes = min(pack_bytes, model.stat().st_size // ALIGNMENT * ALIGNMENT)
                copies.append(n_bytes / copy_s(model, Path(place) / "copy", n_bytes, jobs) / 1e6)
    result = {
        "bench": "convert_speed",
        **banner(folder),
        "pack_bytes": pack_bytes,
        "jobs": jobs,
        "copy_mb_per_s": [round(x) for x in copies],
        "convert_mb_per_s": [round(x) for x in conversions],
        "convert_to_copy": round(statistics.median(conversions) / statistics.median(copies), 3),
        "resident_mib": resident_kib // 1024,
    }
    report(result, out)


if __name__ == "__main__":
    main()
