"""A cap on the memory and the page cache of a process.

What needs root says so in a sentence; nothing is done halfway in silence.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llama_expert_pack.pypack.errors import UsageError

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryCap:
    """How to start a process under a cap. ``folder`` is its control group, None for systemd's or no cap."""

    prefix: tuple[str, ...] = ()
    folder: Path | None = None

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` under the cap."""
        return [*self.prefix, *argv]

    def peak_bytes(self) -> int | None:
        """Most memory the group had, page cache included."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            if self.folder and (text := _read(self.folder / name)):
                return int(text)
        return None

    def page_cache_bytes(self) -> int | None:
        """Page cache that the group holds now; it stays behind when the group's processes end."""
        stat = _read(self.folder / "memory.stat") if self.folder else ""
        fields = dict(line.split(" ", 1) for line in stat.splitlines())
        value = fields.get("total_cache", fields.get("file"))  # version 1, version 2
        return int(value) if value is not None else None


@contextmanager
def memory_cap(limit_bytes: int | None) -> Iterator[MemoryCap]:
    """A new control group with this limit on memory and page cache, without swap; None: no limit.

    Raises UsageError where neither root's groups nor systemd's can be used.
    """
    if limit_bytes is None:
        yield MemoryCap()
        return
    root, reason = find_memory_groups()
    if root is None:
        yield MemoryCap(_systemd_prefix(limit_bytes, reason))
        return
    folder = root / f"expert-pack-bench-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
        is_v2 = (folder / "memory.max").exists()
        (folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        with suppress(OSError):  # kernels without swap accounting have no such file
            (folder / ("memory.swap.max" if is_v2 else "memory.memsw.limit_in_bytes")).write_text(
                "0" if is_v2 else str(limit_bytes)
            )
    except OSError as error:
        raise UsageError(_no_cap(limit_bytes, f"{folder}: {error.strerror}")) from error
    # the process joins by itself, so that all it allocates is counted
    join = ("sh", "-c", f'echo $$ > "{folder}/cgroup.procs" && exec "$@"', "sh")
    try:
        yield MemoryCap(join, folder)
    finally:
        for _ in range(50):
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)  # the last process is still ending


def find_memory_groups(base: Path = CGROUPS) -> tuple[Path | None, str]:
    """The folder to make groups in that can limit memory, or None and why there is none."""
    controllers = _read(base / "cgroup.controllers")
    if "memory" in controllers.split():
        control = base / "cgroup.subtree_control"
        try:
            if "memory" not in _read(control).split():
                control.write_text("+memory")
            return base, ""
        except OSError as error:
            return None, f"{control}: {error.strerror}"
    if (base / "memory" / "memory.limit_in_bytes").exists():  # version 1
        if os.access(base / "memory", os.W_OK):
            return base / "memory", ""
        return None, f"{base / 'memory'} is not writable"
    return None, f"{base} has no memory controller"


def _systemd_prefix(limit_bytes: int, reason: str) -> tuple[str, ...]:
    prefix = ("systemd-run", "--user", "--scope", "--quiet", "-p", f"MemoryMax={limit_bytes}", "-p", "MemorySwapMax=0")
    try:
        works = subprocess.run([*prefix, "true"], capture_output=True, check=False, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        works = False
    if not works:
        raise UsageError(_no_cap(limit_bytes, reason))
    return prefix


def _no_cap(limit_bytes: int, reason: str) -> str:
    return (
        f"memory cannot be capped at {limit_bytes / 2**30:.1f} GiB here ({reason}, and systemd-run --user does not "
        "work): run as root with `mount -t cgroup2 none /sys/fs/cgroup`, or leave out --ram-cap"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
