"""How much memory this process may still take: what the machine has, and what its control groups allow."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def host_memory_free(proc: Path = Path("/proc")) -> int:
    """Bytes that can be allocated without swapping: MemAvailable, or less if a control group says so.

    Groups are v1 or v2; page cache that one could drop counts as free. ``proc``: where procfs is mounted.
    """
    free = _mem_available(proc)
    for folder, is_v2 in _memory_groups(proc):
        left = _group_free(folder, is_v2)
        if left is not None:
            free = min(free, left)
    return max(0, free)


def _mem_available(proc: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _memory_groups(proc: Path) -> list[tuple[Path, bool]]:
    """Folders of this process's memory groups up to the visible root, and whether each is a v2 group."""
    try:
        groups = (proc / "self/cgroup").read_text().splitlines()
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, bool]] = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        is_v2 = controllers == ""
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            left, _, right = mount.partition(" - ")
            fs_type, _, options = right.split(" ", 2)
            if fs_type != ("cgroup2" if is_v2 else "cgroup") or (not is_v2 and "memory" not in options.split(",")):
                continue
            root, mount_point = left.split()[3:5]
            found += [(folder, is_v2) for folder in _up_to_root(Path(mount_point), root, path)]
    return found


def _up_to_root(mount_point: Path, root: str, path: str) -> list[Path]:
    """The group's folder and its parents below the mount point; a container may see only its own subtree."""
    try:
        inside = PurePosixPath(path).relative_to(root)
    except ValueError:
        inside = PurePosixPath()
    names = [name for name in inside.parts if name not in ("/", "..")]
    return [mount_point.joinpath(*names[:n]) for n in range(len(names), -1, -1)]


def _group_free(folder: Path, is_v2: bool) -> int | None:
    limit_name, usage_name, cache_field = (
        ("memory.max", "memory.current", "inactive_file")
        if is_v2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # the root group has no limit files; a group may vanish while it is read
    return int(limit) - usage + int(stat.get(cache_field, "0"))
