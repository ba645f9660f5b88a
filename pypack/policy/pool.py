"""A pool: the slots that experts of one block size compete for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pool:
    """Slots ``first_slot .. first_slot + n_slots - 1``. The last ``n_host`` of them lie in host memory, where a GPU's kernels
    read them in place; the others in a row from byte ``offset`` of the device's arena, with blocks of no slot behind them:
    ``n_spare`` through which experts change places, then ``n_transit`` that get copies of what is read into host memory.

    ``n_per_token``: experts of its layers that one token uses.
    """

    block_bytes: int
    layers: tuple[int, ...]
    n_experts: int
    first_slot: int
    n_slots: int
    offset: int
    n_per_token: int
    n_host: int = 0
    n_spare: int = 0
    n_transit: int = 0

    @property
    def n_device(self) -> int:
        """Slots in the device's arena, at first."""
        return self.n_slots - self.n_host
