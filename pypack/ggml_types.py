"""What ggml's types cost in bytes: values in a quantization block, bytes of that block."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple


class TypeTraits(NamedTuple):
    """A ggml type: its name, how many values form one block, and the bytes of that block."""

    name: str
    block_values: int
    block_bytes: int


def _quant_sizes() -> dict[int, TypeTraits]:
    """gguf's table. Its file alone: importing all of gguf takes longer than loading a small model."""
    package = importlib.util.find_spec("gguf")
    assert package is not None and package.origin is not None
    spec = importlib.util.spec_from_file_location("_gguf_constants", Path(package.origin).with_name("constants.py"))
    assert spec is not None and spec.loader is not None
    constants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(constants)
    return {int(t): TypeTraits(t.name, values, size) for t, (values, size) in constants.GGML_QUANT_SIZES.items()}


# As in the pinned llama.cpp; gguf 0.19 does not list the first yet, and has the size of an older one of the second.
_PINNED: dict[int, TypeTraits] = {42: TypeTraits("Q2_0", 64, 18), 9: TypeTraits("Q8_1", 32, 36)}

GGML_TYPES: dict[int, TypeTraits] = {
    **_quant_sizes(),
    **_PINNED,
}

# No backend multiplies with these: stock loads such a model and crashes in the first evaluation.
NOT_COMPUTED_TYPES = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})


def row_bytes(type_id: int, n_values: int) -> int:
    """Bytes of a row of ``n_values`` values; ``n_values`` must be whole blocks of the type."""
    _, block_values, block_bytes = GGML_TYPES[type_id]
    assert n_values % block_values == 0
    return n_values // block_values * block_bytes
