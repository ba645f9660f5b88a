"""A pool: the slots that experts of one block size compete for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pool:
    """Slots ``first_slot .. first_slot + n_slots - 1``, in a row from byte ``offset`` of the arena.

    ``n_per_token``: experts of its layers that one token uses.
    """

    block_bytes: int
    layers: tuple[int, ...]
    n_experts: int
    first_slot: int
    n_slots: int
    offset: int
    n_per_token: int
