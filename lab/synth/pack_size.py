"""How large the expert pack of a model will be, from its sizes alone.

Written from the description of the format and not with pypack's code, so that each checks the other.
"""

from __future__ import annotations

from lab.synth.blocks import TYPES, row_bytes
from lab.synth.model import tensors
from lab.synth.shape import Shape, Tensor

ROLE_ALIGNMENT = 256
BLOCK_ALIGNMENT = 4096
PADDED_COLUMNS = 512


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def is_expert(tensor: Tensor) -> bool:
    """Whether the tensor goes into the pack."""
    return tensor.name.endswith(("_exps.weight", "_chexps.weight"))


def role_bytes(tensor: Tensor) -> int:
    """Bytes that one expert's rows take in a block, with the zeros behind them."""
    n_columns, n_rows, _ = tensor.ne
    n_bytes = row_bytes(tensor.type, n_columns) * n_rows
    if n_columns % PADDED_COLUMNS:
        block = TYPES[tensor.type]
        n_missing = PADDED_COLUMNS - n_columns % PADDED_COLUMNS
        n_bytes += -(-n_missing // block.n_elements) * block.n_bytes
    return _round_up(n_bytes, ROLE_ALIGNMENT)


def blocks(shape: Shape) -> list[tuple[int, int]]:
    """(experts, bytes of a block) of each pack layer, in the order of the pack."""
    groups: dict[tuple[int, str], tuple[int, int]] = {}
    for tensor in filter(is_expert, tensors(shape)):
        _, layer, name, _ = tensor.name.split(".")
        key = int(layer), "chexps" if name.endswith("chexps") else "exps"
        n_bytes = groups.get(key, (0, 0))[1] + role_bytes(tensor)
        groups[key] = tensor.ne[2], n_bytes
    order = sorted(groups, key=lambda key: (key[0], key[1] == "chexps"))
    return [(groups[key][0], _round_up(groups[key][1], BLOCK_ALIGNMENT)) for key in order]


def payload_bytes(shape: Shape) -> int:
    """Bytes of all blocks."""
    return sum(n_experts * n_bytes for n_experts, n_bytes in blocks(shape))
