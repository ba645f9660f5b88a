"""Random weights straight in ggml's block formats, without running a quantizer.

Quants are random bits; only the scales of a block are set, so that the weights have the wanted root mean
square and, over many blocks, a mean of zero. Everything comes from raw generator output, which numpy keeps
stable across versions: the same seed gives the same bytes on every machine.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

CHUNK_BYTES = 4 << 20
SCALE_STEPS = 64  # magnitudes of a block scale, 0.5 to 1.5 times their mean


@dataclass(frozen=True)
class BlockType:
    """One ggml type: `n_elements` weights stored in `n_bytes`.

    `unit_rms` is the root mean square of a weight in a block of scale 1 with random quants. `scales` are
    (byte offset, factor) of the block's float16 scales; `finish` sets scales that are stored otherwise.
    """

    id: int
    n_elements: int
    n_bytes: int
    unit_rms: float = 1.0
    scales: tuple[tuple[int, float], ...] = ()
    finish: Callable[[Bytes, float], None] | None = None


def _set_e8m0(blocks: Bytes, scale: float) -> None:
    """MXFP4: a power of two per block; a factor of 2 up or down around the wanted one."""
    exponent = round(float(np.log2(scale))) + 128
    blocks[:, 0] = (blocks[:, 0] % 3) + np.uint8(exponent - 1)


def _set_ue4m3(blocks: Bytes, scale: float) -> None:
    """NVFP4: four scales a block, 4 bits of exponent and 3 of mantissa; the mantissa stays random."""
    exponent = int(np.clip(round(float(np.log2(scale / 1.44))) + 8, 0, 14))
    blocks[:, :4] = (blocks[:, :4] & 7) | np.uint8(exponent << 3)


def _set_iq1_m(blocks: Bytes, scale: float) -> None:
    """IQ1_M: the float16 scale is spread over the high nibbles of the last four 16-bit words."""
    bits = int(np.array(scale, np.float16).view(np.uint16))
    for word in range(4):
        high = 48 + 2 * word + 1
        blocks[:, high] = (blocks[:, high] & 0x0F) | np.uint8((bits >> (4 * word) & 0xF) << 4)


WEIGHT_TYPES: dict[str, BlockType] = {
    "F32": BlockType(0, 1, 4),
    "F16": BlockType(1, 1, 2),
    "BF16": BlockType(30, 1, 2),
    "Q4_0": BlockType(2, 32, 18, 4.83, ((0, 1.0),)),
    "Q4_1": BlockType(3, 32, 20, 4.79, ((0, 1.0), (2, -7.5))),
    "Q5_0": BlockType(6, 32, 22, 9.61, ((0, 1.0),)),
    "Q5_1": BlockType(7, 32, 24, 9.57, ((0, 1.0), (2, -15.5))),
    "Q8_0": BlockType(8, 32, 34, 76.7, ((0, 1.0),)),
    "Q2_K": BlockType(10, 256, 84, 14.4, ((80, 1.0), (82, 1.5))),
    "Q3_K": BlockType(11, 256, 110, 44.9, ((108, 1.0),)),
    "Q4_K": BlockType(12, 256, 144, 268.0, ((0, 1.0), (2, 7.5))),
    "Q5_K": BlockType(13, 256, 176, 549.0, ((0, 1.0), (2, 15.5))),
    "Q6_K": BlockType(14, 256, 210, 1430.0, ((208, 1.0),)),
    "IQ2_XXS": BlockType(16, 256, 66, 55.7, ((0, 1.0),)),
    "IQ2_XS": BlockType(17, 256, 74, 58.2, ((0, 1.0),)),
    "IQ3_XXS": BlockType(18, 256, 98, 148.0, ((0, 1.0),)),
    "IQ1_S": BlockType(19, 256, 50, 7.41, ((0, 1.0),)),
    "IQ4_NL": BlockType(20, 32, 18, 70.3, ((0, 1.0),)),
    "IQ3_S": BlockType(21, 256, 110, 145.0, ((0, 1.0),)),
    "IQ2_S": BlockType(22, 256, 82, 58.9, ((0, 1.0),)),
    "IQ4_XS": BlockType(23, 256, 136, 1300.0, ((0, 1.0),)),
    "IQ1_M": BlockType(29, 256, 56, 7.2, (), _set_iq1_m),
    "TQ1_0": BlockType(34, 256, 54, 0.848, ((52, 1.0),)),
    "TQ2_0": BlockType(35, 256, 66, 1.27, ((64, 1.0),)),
    "MXFP4": BlockType(39, 32, 17, 7.67, (), _set_e8m0),
    "NVFP4": BlockType(40, 64, 36, 4.28, (), _set_ue4m3),
    "Q1_0": BlockType(41, 128, 18, 1.05, ((0, 1.0),)),
    "Q2_0": BlockType(42, 64, 18, 1.28, ((0, 1.0),)),
}
# Types that no matrix multiplication takes: I32 is for tables, the others are for tests of refusals.
OTHER_TYPES: dict[str, BlockType] = {
    "Q8_1": BlockType(9, 32, 36),
    "Q8_K": BlockType(15, 256, 292),
    "I8": BlockType(24, 1, 1),
    "I16": BlockType(25, 1, 2),
    "I32": BlockType(26, 1, 4),
    "I64": BlockType(27, 1, 8),
    "F64": BlockType(28, 1, 8),
}
TYPES = WEIGHT_TYPES | OTHER_TYPES


def row_bytes(type_name: str, n_columns: int) -> int:
    """Bytes of one row of `n_columns` weights; ValueError if the row does not end on a block boundary."""
    block = TYPES[type_name]
    if n_columns % block.n_elements:
        raise ValueError(f"rows of {n_columns} can't be {type_name}: it packs {block.n_elements} values a block")
    return n_columns // block.n_elements * block.n_bytes


def generator(seed: int, name: str) -> np.random.SFC64:
    """The random bits of one tensor: they depend on the seed and its name, not on the other tensors."""
    return np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))


def random_bytes(bits: np.random.SFC64, n_bytes: int) -> Bytes:
    """[n_bytes] raw generator output."""
    return bits.random_raw(-(-n_bytes // 8)).view(np.uint8)[:n_bytes]


def uniform(bits: np.random.SFC64, n: int, rms: float) -> NDArray[np.float32]:
    """`n` float32 around zero with the given root mean square."""
    raw = random_bytes(bits, 4 * n).view(np.uint32) >> 8
    values: NDArray[np.float32] = raw.astype(np.float32) * np.float32(2**-23) - np.float32(1)
    values *= np.float32(rms * math.sqrt(3))
    return values


def _floats(type_name: str, bits: np.random.SFC64, n: int, rms: float) -> NDArray[Any]:
    values = uniform(bits, n, rms)
    if type_name == "F32":
        return values
    if type_name == "F16":
        return values.astype(np.float16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)  # BF16


def _quantized(block: BlockType, bits: np.random.SFC64, n_blocks: int, rms: float) -> Bytes:
    blocks = random_bytes(bits, n_blocks * block.n_bytes).reshape(n_blocks, block.n_bytes)
    scale = rms / block.unit_rms
    if block.scales:
        magnitudes = np.linspace(0.5, 1.5, SCALE_STEPS) * scale
        table = np.concatenate([magnitudes, -magnitudes])
        # The bytes that the first scale overwrites are random and used nowhere else: they choose the scale.
        choice = blocks[:, block.scales[0][0]] % np.uint8(2 * SCALE_STEPS)
        for offset, factor in block.scales:
            values = (table * factor).astype(np.float16).view(np.uint8).reshape(-1, 2)
            blocks[:, offset : offset + 2] = values[choice]
    if block.finish:
        block.finish(blocks, scale)
    return blocks


def weights(type_name: str, bits: np.random.SFC64, n_elements: int, rms: float) -> Iterator[NDArray[Any]]:
    """Yields `n_elements` random weights as arrays of a few MiB in the layout of `type_name`."""
    block = TYPES[type_name]
    left = n_elements // block.n_elements
    step = max(1, CHUNK_BYTES // block.n_bytes)
    while left:
        n_blocks = min(step, left)
        if type_name in ("F32", "F16", "BF16"):
            yield _floats(type_name, bits, n_blocks, rms)
        else:
            yield _quantized(block, bits, n_blocks, rms)
        left -= n_blocks
