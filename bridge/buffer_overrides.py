"""Experts of the first blocks on the CPU, as llama-server's --n-cpu-moe has it, in the parameters of a model."""

from __future__ import annotations

import ctypes
from typing import Any

from .library import library_dir

_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # upstream's LLM_FFN_EXPS_REGEX: biases and scales, too


class _Override(ctypes.Structure):
    """``llama_model_tensor_buft_override``"""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def set_cpu_experts(params: Any, n_blocks: int) -> Any:
    """Have ``llama_model_params`` place the experts of ``n_blocks`` blocks in the CPU's memory.

    Returns what the caller must keep until the model is loaded.
    """
    cpu = ctypes.CDLL(str(library_dir() / "libggml-base.so")).ggml_backend_cpu_buffer_type
    cpu.restype = ctypes.c_void_p
    overrides = (_Override * (n_blocks + 1))()  # the last one ends them
    for block in range(n_blocks):
        overrides[block] = _Override(rf"blk\.{block}{_EXPERTS}".encode(), cpu())
    params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    return overrides
