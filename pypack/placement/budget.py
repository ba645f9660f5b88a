"""How many bytes the cache may take, and how they are divided into slots.

A *pool* is the slots of one size for one device: layers whose blocks have the same size share it.
All pools of a device lie one after the other in its arena; each may go on in host memory, which a GPU reads in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import BudgetError
from ..format.layout import Layer, payload_bytes
from ..policy.pool import Pool
from ..values.sizes import is_auto, parse_size, size_text
from .tiers import N_SPARE

SPARE_SHARE = 80  # a pool has a spare block for so many slots, N_SPARE at most: they hold nothing that need not be read
POOL_OF_ONE_SPARE = 16  # slots, of a pool that is smaller than that


def cache_budget(
    requested: str | int | float, layers: Sequence[Layer], free_bytes: int, reserve_bytes: int, device: str = "CPU"
) -> int:
    """Bytes that ``requested`` comes to on a device (by its ggml name) that has ``free_bytes``: a size, a percentage of what
    is free after the reserve, or ``"auto"``: all experts if they fit in a share of that, otherwise the share.

    The share is half of the host's memory, which others need too, and all of a GPU's. Raises UsageError.
    """
    usable = max(0, free_bytes - reserve_bytes)
    if is_auto(requested):
        return min(payload_bytes(layers), usable // 2 if device == "CPU" else usable)
    return parse_size(requested, usable, "expert_cache")


def host_budget(
    requested: str | int | float,
    layers: Sequence[Layer],
    all_layers: Sequence[Layer],
    free_bytes: int,
    reserve_bytes: int,
) -> int:
    """Bytes of host memory for experts of ``layers``, which one GPU computes: their part of what ``requested`` comes to for
    ``all_layers``. It is a size, a percentage of what is free after the reserve, or ``"auto"``: that, less a tenth for others.

    Raises UsageError.
    """
    usable = max(0, free_bytes - reserve_bytes)
    whole = usable - usable // 10 if is_auto(requested) else parse_size(requested, usable, "expert_ram")
    return min(whole, usable) * payload_bytes(layers) // max(1, payload_bytes(all_layers))


def cpu_budget(
    cache: str | int | float,
    ram: str | int | float,
    layers: Sequence[Layer],
    ram_bytes: int,
    top_k: int,
    free_bytes: int,
    reserve_bytes: int,
    *,
    beside_gpu: bool,
) -> tuple[int, str]:
    """Bytes of host memory for the slots of ``layers``, which the CPU computes, and the option that said so: ``expert_ram``,
    of which they get ``ram_bytes`` and at least a working set, if that is not 0; else ``expert_cache``.

    ``beside_gpu``: a GPU computes other layers; without one ``"auto"`` of ``expert_ram`` is 0.

    Raises UsageError.
    """
    if beside_gpu if is_auto(ram) else parse_size(ram, 1 << 60, "expert_ram") > 0:
        usable, least = max(0, free_bytes - reserve_bytes), working_set_bytes(layers, top_k)
        whole = free_bytes if is_auto(ram) else parse_size(ram, usable, "expert_ram")
        return (max(ram_bytes, min(whole, least)) if usable >= least else whole), "expert_ram"
    return cache_budget(cache, layers, free_bytes, reserve_bytes), "expert_cache"


def working_set_bytes(layers: Sequence[Layer], top_k: int) -> int:
    """The least that the slots of these layers take."""
    least: dict[int, int] = {}
    for layer in layers:
        least[layer.block_bytes] = max(least.get(layer.block_bytes, 0), min(max(top_k, 1), layer.n_expert))
    return sum(n * size for size, n in least.items())


def cache_room(requested: str | int | float, expert_bytes: int, free_bytes: int) -> int:
    """Bytes that must stay free for the cache of ``expert_bytes`` of experts on a device that nothing was loaded on yet.

    What will be free then is not known: ``"auto"`` and percentages get half of what is free now.
    """
    is_share = is_auto(requested) or (isinstance(requested, str) and requested.strip().endswith("%"))
    return min(expert_bytes, free_bytes // 2 if is_share else parse_size(requested, 0, "expert_cache"))


@dataclass(frozen=True)
class PoolPlan:
    """The pools of one device. Slots count from 0 here: the cache has numbers for those of all devices."""

    device: str
    pools: tuple[Pool, ...]

    @property
    def n_slots(self) -> int:
        """Of all pools."""
        return sum(pool.n_slots for pool in self.pools)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the device's arena."""
        return sum((pool.n_device + pool.n_spare + pool.n_transit) * pool.block_bytes for pool in self.pools)

    @property
    def host_bytes(self) -> int:
        """Bytes of all slots in host memory that the device reads in place."""
        return sum(pool.n_host * pool.block_bytes for pool in self.pools)

    @property
    def pool_of_layer(self) -> dict[int, int]:
        """Index into ``pools`` by ``Layer.index``."""
        return {layer: i for i, pool in enumerate(self.pools) for layer in pool.layers}

    def arena_slots(self) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
        """[n] slots in the arena, and [n] where each starts there, bytes; multiples of 4096."""
        slots, offsets = [np.empty(0, np.int32)], [np.empty(0, np.uint64)]
        for pool in self.pools:
            rows = np.arange(pool.n_device)
            slots.append((rows + pool.first_slot).astype(np.int32))
            offsets.append((rows * pool.block_bytes + pool.offset).astype(np.uint64))
        return np.concatenate(slots), np.concatenate(offsets)

    def beside_slots(self, pool: Pool) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """[pool.n_spare] and [pool.n_transit] where its spare blocks and those in transit start in the arena, bytes."""
        rows = np.arange(pool.n_spare + pool.n_transit) + pool.n_device
        starts = (rows * pool.block_bytes + pool.offset).astype(np.uint64)
        return starts[: pool.n_spare], starts[pool.n_spare :]


def plan_pools(
    layers: Sequence[Layer],
    budget_bytes: int,
    top_k: int,
    device: str = "CPU",
    *,
    free_bytes: int | None = None,
    reserve_bytes: int = 0,
    host_bytes: int = 0,
    option: str = "expert_cache",
) -> PoolPlan:
    """Divide ``min(budget_bytes, free_bytes - reserve_bytes)`` among the pools of one device's ``layers``.

    Every pool gets the same share of its experts, but at least one working set: min(top_k, n_expert) of its
    largest layer. Raises :class:`BudgetError` if that does not fit. ``free_bytes`` None: not known, no limit.
    ``host_bytes`` of host memory go to the experts that are left, each pool's the same share. ``option``: that the budget
    comes from.
    """
    usable = budget_bytes if free_bytes is None else min(budget_bytes, free_bytes - reserve_bytes)
    groups: dict[int, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(layer.block_bytes, []).append(layer)
    sizes = list(groups)
    n_experts = [sum(layer.n_expert for layer in groups[size]) for size in sizes]
    n_least = [max(min(max(top_k, 1), layer.n_expert) for layer in groups[size]) for size in sizes]

    least_bytes = _bytes(n_least, sizes)
    if usable < least_bytes:
        raise BudgetError(_too_small(device, budget_bytes, free_bytes, reserve_bytes, least_bytes, top_k, option))
    n_slots = _share(usable, sizes, n_least, n_experts)
    n_host, beside = _host_share(host_bytes, sizes, n_least, n_experts, n_slots)

    pools: list[Pool] = []
    first_slot = offset = 0
    for size, n_expert, n, more, (spare, transit) in zip(sizes, n_experts, n_slots, n_host, beside, strict=True):
        indices = tuple(layer.index for layer in groups[size])
        n_per_token = sum(min(max(top_k, 1), layer.n_expert) for layer in groups[size])
        n_all = n - spare - transit + more
        pools.append(Pool(size, indices, n_expert, first_slot, n_all, offset, n_per_token, more, spare, transit))
        first_slot += n_all
        offset += n * size
    return PoolPlan(device, tuple(pools))


def _host_share(
    host_bytes: int, sizes: list[int], n_least: list[int], n_experts: list[int], n_slots: list[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Slots of each pool in host memory, and how many of its ``n_slots`` become spare blocks and blocks in transit for that."""
    columns = list(zip(n_experts, n_slots, n_least, strict=True))
    beside = [_beside(n - least, least) if n < n_expert else (0, 0) for n_expert, n, least in columns]
    n_left = [n_expert - n + sum(blocks) for (n_expert, n, _), blocks in zip(columns, beside, strict=True)]
    n_host = _share(host_bytes, sizes, [0] * len(sizes), n_left)
    for i, (n_expert, n, _) in enumerate(columns):
        n_spare = beside[i][0]
        if n + n_host[i] - n_spare >= n_expert:  # nothing is read any more once all are there
            beside[i], n_host[i] = (n_spare, 0), n_expert - n + n_spare
        if n_host[i] <= sum(beside[i]):  # it would hold no more than these blocks take away
            beside[i], n_host[i] = (0, 0), 0
    return n_host, beside


def _beside(n_slots: int, working_set: int) -> tuple[int, int]:
    """Spare blocks, few beside the slots, and blocks in transit: for all that a layer of one token may miss."""
    spare = min(N_SPARE, max(n_slots // SPARE_SHARE, int(n_slots >= POOL_OF_ONE_SPARE)))
    return spare, min(working_set, (n_slots - spare) // 2)


def _share(usable: int, sizes: list[int], n_least: list[int], n_experts: list[int]) -> list[int]:
    """Slots of each pool: the largest common share of its experts that fits, then slots for what is left."""

    def at(share: int) -> list[int]:  # share in 1/2^40 of a pool's experts
        return [max(least, (share * n) >> 40) for least, n in zip(n_least, n_experts, strict=True)]

    low, high = 0, 1 << 40  # at(low) fits
    while low < high:
        middle = (low + high + 1) // 2
        if _bytes(at(middle), sizes) <= usable:
            low = middle
        else:
            high = middle - 1
    n_slots = at(low)
    left = usable - _bytes(n_slots, sizes)
    for i in sorted(range(len(sizes)), key=lambda i: n_slots[i] / max(1, n_experts[i])):
        more = min(left // sizes[i], n_experts[i] - n_slots[i])
        n_slots[i] += more
        left -= more * sizes[i]
    return n_slots


def _bytes(n_slots: list[int], sizes: list[int]) -> int:
    return sum(n * size for n, size in zip(n_slots, sizes, strict=True))


def _too_small(
    device: str,
    budget_bytes: int,
    free_bytes: int | None,
    reserve_bytes: int,
    least_bytes: int,
    top_k: int,
    option: str,
) -> str:
    needs = f"one working set of top-{top_k} experts needs at least {least_bytes} bytes"
    if free_bytes is None:
        return f"the expert cache on {device} is too small: it has {size_text(budget_bytes)}, {needs}: raise the budget"
    advice: list[str] = []
    if free_bytes - reserve_bytes < least_bytes:
        advice.append("lower expert_cache_reserve" if least_bytes <= free_bytes else "make more memory free")
    if 0 < budget_bytes < least_bytes or not advice:
        advice.append(f"raise {option}")
    return (
        f"the expert cache on {device} is too small: {option} comes to {size_text(budget_bytes)}, "
        f"{size_text(free_bytes)} are free and expert_cache_reserve keeps {size_text(reserve_bytes)} of that, but {needs}: "
        f"{' and '.join(advice)}"
    )
