"""Where the roles of an expert lie in its block, and where the blocks lie in the pack.

    block = role, zeros, role, zeros, ...        in the order gate_up, gate, up, down (those the layer has)

A role starts at a multiple of 256. Kernels read rows in steps of 512 values, so a role whose rows are no
multiple of 512 is followed by at least the bytes of the missing values, zeroed: garbage NaN
times zero would be NaN. A block is rounded up to 4096 bytes: one direct read brings all of it and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from ..ggml_types import GGML_TYPES, row_bytes

ROLE_ORDER = ("gate_up", "gate", "up", "down")
GROUP_ORDER = ("exps", "chexps")
ALIGNMENT = 4096
ROLE_ALIGNMENT = 256
ROW_STEP_VALUES = 512


class Role(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One per-expert weight of a layer: ``bytes`` of one expert's share, ``offset`` of it in the block.

    ``ne`` is the tensor's shape: columns, rows, experts. ``type`` is the number of the ggml type.
    """

    name: str
    tensor: str
    type: int
    type_name: str
    ne: tuple[int, int, int]
    bytes: int
    offset: int


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The experts one router picks from: ``blk.{block}`` and its ``group`` ("exps", or grovemoe's "chexps").

    Expert ``e`` has key ``first_key + e``; in the pack its block starts at ``data_offset + e * block_bytes``.
    """

    index: int
    block: int
    group: str
    n_expert: int
    first_key: int
    block_bytes: int
    roles: tuple[Role, ...]
    data_offset: int = 0


class Weight(NamedTuple):
    """A routed tensor before it has a place in the block."""

    role: str
    tensor: str
    type: int
    ne: tuple[int, int, int]


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is not below ``value``."""
    return -(-value // alignment) * alignment


def role_span_bytes(type_id: int, ne: Sequence[int]) -> int:
    """Bytes that one expert's share takes in a block, with its zero padding."""
    size_bytes = row_bytes(type_id, ne[0]) * ne[1]
    if ne[0] % ROW_STEP_VALUES:
        size_bytes += row_bytes(type_id, ROW_STEP_VALUES - ne[0] % ROW_STEP_VALUES)
    return align_up(size_bytes, ROLE_ALIGNMENT)


def lay_out_block(weights: Iterable[Weight]) -> tuple[tuple[Role, ...], int]:
    """The roles with their places, and the block's size in bytes."""
    offset = 0
    roles = []
    for weight in sorted(weights, key=lambda w: ROLE_ORDER.index(w.role)):
        size_bytes = row_bytes(weight.type, weight.ne[0]) * weight.ne[1]
        type_name = GGML_TYPES[weight.type].name
        roles.append(Role(weight.role, weight.tensor, weight.type, type_name, weight.ne, size_bytes, offset))
        offset += role_span_bytes(weight.type, weight.ne)
    return tuple(roles), align_up(offset, ALIGNMENT)


def lay_out_pack(
    blocks: Iterable[tuple[int, str, Iterable[Weight]]], header_bytes: int, entry_bytes: int
) -> list[Layer]:
    """Layers of a pack, in order of (block, group), one after the other behind header and index.

    Args:
        blocks: (block number, group, its weights), in any order.
        header_bytes: bytes in front of the index.
        entry_bytes: bytes of one index entry; there is one for each expert.
    """
    ordered = sorted(blocks, key=lambda b: (b[0], GROUP_ORDER.index(b[1])))
    laid_out = [(block, group, *lay_out_block(weights)) for block, group, weights in ordered]
    n_keys = sum(roles[0].ne[2] for _, _, roles, _ in laid_out)
    data_offset = align_up(header_bytes + n_keys * entry_bytes, ALIGNMENT)
    first_key = 0
    layers = []
    for index, (block, group, roles, block_bytes) in enumerate(laid_out):
        n_expert = roles[0].ne[2]
        layers.append(Layer(index, block, group, n_expert, first_key, block_bytes, roles, data_offset))
        first_key += n_expert
        data_offset += n_expert * block_bytes
    return layers


def payload_bytes(layers: Iterable[Layer]) -> int:
    """Bytes of all blocks."""
    return sum(layer.n_expert * layer.block_bytes for layer in layers)


def source_bytes(layers: Iterable[Layer]) -> int:
    """Bytes of all routed weights in the GGUF, without padding."""
    return sum(layer.n_expert * role.bytes for layer in layers for role in layer.roles)
