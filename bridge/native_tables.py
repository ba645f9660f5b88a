"""What native is told of a pack: its layers and blocks, and the tables that both sides share."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..pypack.format.layout import Layer
from ..pypack.format.pack import Pack
from ..pypack.placement.cache import ExpertCache
from ..pypack.placement.slots import N_NEXT
from ..pypack.placement.tiers import HITS_A_PLAN, MOVES
from ..pypack.stats.counters import Counter, Counters
from ..pypack.values.options import Verify
from ._provider import ffi, lib

_CHECKS: dict[Verify, int] = {"off": 0, "first": 1, "every": 2}  # expert_block.check
_BLOCK = np.dtype([("offset", "<i8"), ("fd", "<i4"), ("check", "<i4"), ("digest", "u1", (16,))])  # expert_block

assert lib.EXPERT_NEXT_SLOTS == N_NEXT
assert lib.EXPERT_MOVES == MOVES
assert lib.EXPERT_HITS_A_PLAN == HITS_A_PLAN
assert _BLOCK.itemsize == ffi.sizeof("expert_block")
assert all(at == ffi.offsetof("expert_block", name) for name, (_, at, *_) in (_BLOCK.fields or {}).items())


class SharedCounters(Counters):
    """Counters that native adds to as well."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = ffi.from_buffer("int64_t[]", self.array)

    def add(self, counter: Counter, n: int = 1) -> None:
        lib.expert_count(self._numbers + int(counter), n)


def describe_blocks(pack: Pack, fd: int, verify: Verify) -> NDArray[np.void]:
    """[n_keys] of ``expert_block``. ``fd``: the pack's file, open; -1 leaves all blocks to the provider."""
    blocks = np.zeros(pack.n_keys, _BLOCK)
    blocks["fd"] = fd
    for name in ("offset", "digest"):
        blocks[name] = pack.index[name]
    blocks["check"] = _CHECKS[verify]
    return blocks


def describe_layers(layers: Sequence[Layer], on_cpu: Container[int]) -> Any:
    """[n_layers] of ``expert_layer``. ``on_cpu``: indices of those that are computed on the CPU in any case."""
    described = ffi.new("expert_layer[]", len(layers))
    for target, layer in zip(described, layers, strict=True):
        target.n_expert, target.first_key, target.on_cpu = layer.n_expert, layer.first_key, layer.index in on_cpu
        target.block_bytes, target.n_roles = layer.block_bytes, len(layer.roles)
        for place, role in zip(target.roles, layer.roles, strict=False):
            place.tensor, place.type = role.tensor.encode(), role.type
            place.ne[0:3] = list(role.ne)
            place.bytes, place.offset = role.bytes, role.offset
    return described


def share_tables(cache: ExpertCache, counters: Counters, blocks: NDArray[np.void]) -> Any:
    """An ``expert_tables`` with the arrays, which the caller keeps alive; how to read is left to fill in."""
    tables = ffi.new("expert_tables *")
    for name in ("slot_of", "reserved_slot", "layer_slots", "layer_pool", "next_slots"):
        setattr(tables, name, ffi.from_buffer("int32_t[]", getattr(cache, name)))
    for name in ("freq", "last_use", "owner"):
        setattr(tables, name, ffi.from_buffer("int64_t[]", getattr(cache, name)))
    for name, kind in (
        ("in_place", "uint8_t[]"),
        ("seen_in_place", "uint8_t[]"),
        ("seen_freq", "int64_t[]"),
        ("seen_owner", "int64_t[]"),
        ("moves_up", "int32_t[]"),
        ("moves_down", "int32_t[]"),
    ):
        setattr(tables, name, ffi.from_buffer(kind, getattr(cache.tiers, name)))
    tables.counters = ffi.from_buffer("int64_t[]", counters.array)
    tables.blocks = ffi.from_buffer("expert_block[]", blocks)
    return tables
