"""How many tokens of a prompt are computed at a time (``n_ubatch``): each such batch needs nearly all experts of a layer, so
it reads all that no memory holds; but what computing it takes of memory is lost to the experts there.

The largest batch is chosen beside which the experts keep most of the memory that they would have beside the smallest one, and all
of it where all have room then. Where they all lie where they are computed, nothing is read twice: batches are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..format.layout import Layer

LEAST, MOST = 512, 8192  # tokens: llama.cpp's default; beyond that reading is rare enough
MOST_ON_CPU = (
    1024  # larger ones were 5 to 10 % slower to compute there, and the reads of this one hide behind computing
)
KEPT = 3 / 4
PASS_VALUE_BYTES = (
    6  # on a GPU, for each value of a row: float32 between passes, one byte for the product, some for ids
)


@dataclass(frozen=True)
class Held:
    """What the experts would have, bytes: on each device that computes some, and there and in host memory beside it together."""

    on_devices: tuple[int, ...]
    everywhere: int


def pass_bytes(layers: Sequence[Layer], top_k: int, n_ubatch: int) -> int:
    """What computing a batch's experts takes of a GPU beside what llama.cpp plans: rows of one layer."""
    widest = max((max(role.ne[:2]) for layer in layers for role in layer.roles), default=0)
    return n_ubatch * max(top_k, 1) * widest * PASS_VALUE_BYTES


def choose_batch(most: int, whole_bytes: int, held_with: Callable[[int], Held | None]) -> int:
    """Tokens of a batch, from LEAST to ``most``. ``whole_bytes``: of all experts; ``held_with``: what they have beside batches of
    so many tokens, None if these can't be."""
    most = min(most, MOST)
    least = held_with(LEAST) if most > LEAST else None
    if least is None or sum(least.on_devices) >= whole_bytes:
        return min(most, LEAST)
    size = most
    while size > LEAST:
        held = held_with(size)
        if held is not None and _keeps_enough(held, least, whole_bytes):
            return size
        size = min(size - 1, MOST) // LEAST
        size = LEAST << (size.bit_length() - 1)  # the next lower of 512, 1024, 2048, 4096
    return LEAST


def _keeps_enough(held: Held, least: Held, whole_bytes: int) -> bool:
    if least.everywhere >= whole_bytes > held.everywhere:
        return False
    places = [(held.everywhere, least.everywhere), *zip(held.on_devices, least.on_devices, strict=True)]
    return all(here >= KEPT * before for here, before in places)
