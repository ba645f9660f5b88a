from __future__ import annotations

from pathlib import Path

import pytest

from llama_expert_pack.pypack.system.host_memory import host_memory_free


def make_proc(folder: Path, available_kib: int, cgroup: str, mounts: str) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    (folder / "self/cgroup").write_text(cgroup)
    (folder / "self/mountinfo").write_text(mounts)
    return folder


def make_group(folder: Path, names: tuple[str, str, str], limit: str, usage: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, usage_name, cache_field = names
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / usage_name).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cache_field} {cache}\nother 7\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def mount_line(root: str, point: Path, fs_type: str, options: str) -> str:
    return f"30 20 0:29 {root} {point} rw,nosuid shared:9 - {fs_type} {fs_type} {options}\n"


def test_without_groups_it_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    proc = make_proc(tmp_path / "proc", 1000, "", "")
    assert host_memory_free(proc) == 1000 * 1024


@pytest.mark.parametrize("limited", ["a/b", "a", ""])
def test_v2_the_tightest_group_on_the_way_up_counts(tmp_path: Path, limited: str) -> None:
    root = tmp_path / "cgroup"
    for group in ("a/b", "a", ""):
        make_group(root / group, V2, "50000" if group == limited else "max", 20000, 3000)
    proc = make_proc(tmp_path / "proc", 1000, "0::/a/b\n", mount_line("/", root, "cgroup2", "rw"))
    assert host_memory_free(proc) == 33000


def test_v1_memory_group_among_others(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    make_group(root, V1, "9223372036854771712", 0, 0)
    make_group(root / "job", V1, "40000", 10000, 500)
    other = tmp_path / "cpu"
    make_group(other / "job", V1, "1", 0, 0)
    cgroup = "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"
    mounts = mount_line("/", other, "cgroup", "rw,cpu,cpuacct") + mount_line("/", root, "cgroup", "rw,memory")
    assert host_memory_free(make_proc(tmp_path / "proc", 1000, cgroup, mounts)) == 30500


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    make_group(root, V2, "30000", 10000, 0)
    proc = make_proc(tmp_path / "proc", 1000, "0::/box/7\n", mount_line("/box/7", root, "cgroup2", "rw"))
    assert host_memory_free(proc) == 20000


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    make_group(root, V2, "1000", 5000, 0)
    proc = make_proc(tmp_path / "proc", 1000, "0::/\n", mount_line("/", root, "cgroup2", "rw"))
    assert host_memory_free(proc) == 0


def test_this_machine() -> None:
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    assert 0 < host_memory_free() <= total
