"""VRAM and power of the first GPU over time, as nvidia-smi tells."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

QUERY = (
    "nvidia-smi",
    "--query-gpu=timestamp,memory.used,power.draw",
    "--format=csv,noheader,nounits",
    "-i",
    "0",
    "-lms",
    "200",
)


@dataclass
class GpuSamples:
    """(seconds since the epoch, bytes of VRAM in use, watts or None) every 0.2 s."""

    samples: list[tuple[float, int, float | None]] = field(default_factory=list)

    def add(self, line: str) -> None:
        """A line such as "2026/11/29 20:35:47.123, 1024, 98.54"; what cannot be read is left out."""
        try:
            at, used, power = (part.strip() for part in line.split(","))
            seconds = datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            used_bytes = int(used) << 20
        except ValueError:
            return
        try:
            watts = float(power)
        except ValueError:  # "[N/A]": this GPU does not tell
            watts = None
        self.samples.append((seconds, used_bytes, watts))

    def vram_peak_bytes(self) -> int | None:
        """Largest use of the GPU's memory that was seen; None without a GPU."""
        return max((used for _, used, _ in self.samples), default=None)

    def joules(self, start: float, end: float) -> float | None:
        """Energy between two times: the mean power over them; None without a sample in between."""
        watts = [watts for at, _, watts in self.samples if start <= at <= end and watts is not None]
        return sum(watts) / len(watts) * (end - start) if watts else None


@contextmanager
def gpu_samples() -> Iterator[GpuSamples]:
    """Samples while the block runs; none where there is no nvidia-smi."""
    found = GpuSamples()
    try:
        process = subprocess.Popen(QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield found
        return
    assert process.stdout is not None
    stream = process.stdout

    def collect() -> None:
        for line in stream:
            found.add(line)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        process.terminate()
        process.wait()
        thread.join()


def vram_free_bytes() -> int | None:
    """Free memory of the first GPU; None where there is none."""
    query = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "-i", "0")
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        return int(text.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
