"""What a context of a loaded model would take of memory, as native measures it: for Llama and the server alike."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

from .library import library_dir

N_MOST = 64  # devices


class DeviceBytes(NamedTuple):
    """Of a device: what is free on it now, and what the context would take."""

    free: int
    taken: int


@cache
def _function() -> Any:
    function = ctypes.CDLL(str(library_dir() / "libllama.so")).llama_expert_context_bytes
    function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_uint32, ctypes.c_int32] + [ctypes.c_void_p] * 3
    function.restype = ctypes.c_int32
    return function


def context_bytes(model: int, params: int, n_ubatch: int) -> dict[str, DeviceBytes]:
    """By ggml name of the device, for physical batches of ``n_ubatch`` tokens; empty if there can be no such context.

    ``model``, ``params``: addresses of a loaded ``llama_model`` and of its ``llama_context_params``.
    """
    names, free, taken = (ctypes.c_char_p * N_MOST)(), (ctypes.c_uint64 * N_MOST)(), (ctypes.c_uint64 * N_MOST)()
    n_found = _function()(model, params, n_ubatch, N_MOST, names, free, taken)
    return {(names[i] or b"").decode(): DeviceBytes(free[i], taken[i]) for i in range(n_found)}
