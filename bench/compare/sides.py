"""Which sides a comparison has, and which of them fit into the memory that there is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PROCESS_BYTES = 128 << 20  # what a process takes beside weights: Python, libraries, buffers
ROOM = 1.1  # a side fits if its weights times this do
ALL = -1


@dataclass(frozen=True)
class SideSpec:
    """One way to run the model. A `reference` has more memory than the comparison allows, and runs once."""

    name: str
    title: str
    stock: bool
    cpu_layers: int = 0  # the first so many layers' experts are computed on the CPU; ALL: all
    gpu_layers: int = ALL  # -ngl
    direct_io: bool = False
    gpu: bool = False
    capped: bool = True
    reference: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """Bytes. `cap`: limit on memory and page cache of a side; `vram`: free on the GPU, None without one."""

    model: int
    experts: int
    cache: int
    cap: int | None
    memory_free: int
    vram: int | None
    ram: int = 0  # of ours, for experts that a GPU reads in place
    n_layers: int = 0

    @property
    def trunk(self) -> int:
        """All but the experts."""
        return self.model - self.experts


def plan_sides(
    sizes: Sizes, pack: str, options: dict[str, Any], *, offload: bool = False
) -> tuple[list[SideSpec], dict[str, str]]:
    """The sides to run, and for each that cannot be the reason, by name.

    `options` are ours beside pack and cache. `offload`: also stock with what fits into as much VRAM as our cache.
    """
    gpu = sizes.vram is not None
    place = "-ngl 99 --cpu-moe, " if gpu else ""
    packed = {"expert_pack": pack, "expert_cache_reserve": 0, "expert_ram": 0, **options}
    on_cpu = ALL if gpu else 0
    ours = {**packed, "expert_cache": sizes.cache}
    sides = [
        SideSpec("stock-mmap", f"stock, {place}mmap", stock=True, cpu_layers=on_cpu, gpu=gpu),
        SideSpec("ours", "ours, from the pack", stock=False, gpu=gpu, options={**ours, "expert_ram": sizes.ram}),
    ]
    if sizes.ram:
        sides.append(
            SideSpec("ours-no-ram", "ours, no experts in host memory", False, gpu=gpu, reference=True, options=ours)
        )
    if offload:
        sides += _offloaded(sizes)
    left_out: dict[str, str] = {}
    in_memory = sizes.experts if gpu else sizes.model
    allowed = sizes.memory_free if sizes.cap is None else min(sizes.cap, sizes.memory_free)
    direct = SideSpec(
        "stock-direct-io", f"stock, {place or 'repacked, '}direct-I/O load", True, on_cpu, direct_io=True, gpu=gpu
    )
    if in_memory * ROOM + PROCESS_BYTES <= allowed:
        sides.append(direct)
    else:
        left_out[direct.name] = f"needs {_gb(in_memory)} of memory, {_gb(allowed)} allowed"
    if not gpu:
        if sizes.model * ROOM <= sizes.memory_free:
            whole = {**packed, "expert_cache": sizes.experts}
            sides.append(
                SideSpec("ours-all", "ours, all experts in memory", False, capped=False, reference=True, options=whole)
            )
        return sides, left_out
    fits = sizes.model * ROOM <= (sizes.vram or 0)
    for spec in (
        SideSpec("stock-gpu", "stock, all in VRAM", stock=True, gpu=True, reference=True),
        SideSpec(
            "ours-all",
            "ours, all experts in VRAM",
            stock=False,
            gpu=True,
            reference=True,
            options={**packed, "expert_cache": sizes.experts},
        ),
    ):
        if fits:
            sides.append(spec)
        else:
            left_out[spec.name] = f"needs {_gb(sizes.model)} of VRAM, {_gb(sizes.vram or 0)} free"
    return sides, left_out


def _offloaded(sizes: Sizes) -> list[SideSpec]:
    """Stock with as many layers, or as many layers' experts, in VRAM as our cache has bytes for; the rest in memory."""
    n_layers = sizes.n_layers
    n_on_cpu = n_layers - sizes.cache * n_layers // sizes.experts
    in_vram = min(n_layers, (sizes.cache + sizes.trunk) * n_layers // sizes.model)
    load = "direct-I/O load"
    return [
        SideSpec("stock-n-cpu-moe", f"stock, --n-cpu-moe {n_on_cpu}, {load}", True, n_on_cpu, direct_io=True, gpu=True),
        SideSpec("stock-ngl", f"stock, -ngl {in_vram}, {load}", True, 0, in_vram, direct_io=True, gpu=True),
    ]


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB"
