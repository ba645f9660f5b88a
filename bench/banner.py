"""What a benchmark ran on, and how its result is written down."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


def _command(*args: str) -> str:
    try:
        return subprocess.run(args, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def block_queues(path: Path, sys_dev: Path = Path("/sys/dev/block")) -> list[Path]:
    """The `queue` folders of the block devices that hold a file, those under a device mapper included."""
    device = path.stat().st_dev
    found: list[Path] = []
    left = [sys_dev / f"{os.major(device)}:{os.minor(device)}"]
    while left:
        place = left.pop().resolve()
        if not (place / "queue").exists() and (place.parent / "queue").exists():
            place = place.parent  # a partition
        if (place / "queue").exists() and place / "queue" not in found:
            found.append(place / "queue")
            left += list((place / "slaves").glob("*"))
    return found


def _read_ahead_kb(folder: Path) -> int | None:
    try:
        return next((int((queue / "read_ahead_kb").read_text()) for queue in block_queues(folder)), None)
    except (OSError, ValueError):
        return None


def banner(folder: Path) -> dict[str, Any]:
    """Facts about this machine; ``folder`` is where the model files lie."""
    memory = {k: v for k, v in (line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())}
    gpu = _command("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _command("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD") or None,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory["MemTotal"].split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "file_system": _command("findmnt", "-n", "-f", "-o", "FSTYPE", "-T", str(folder)) or None,
        "gpu": gpu or None,
        "read_ahead_kb": _read_ahead_kb(folder),
    }


def report(result: dict[str, Any], out: Path | None) -> None:
    """One line a value for people; one JSON line appended to ``out``."""
    for name, value in result.items():
        print(f"{name:20} {value}")
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
