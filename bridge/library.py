"""Finds the native libraries, proves that they fit this machine and each other, and loads llama_cpp on top of them.

llama-cpp-python opens the libraries in ``LLAMA_CPP_LIB_PATH``, which it reads when it is imported. So this module
must be the first to import it; if another one was, loaded other libraries, it says so.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ..pypack.errors import NativeError
from . import openmp

REBUILD = "reinstall llama-expert-pack on this machine (`make clean build` in a clone)"

# names in /proc/cpuinfo of what the build may use
_CPU_FLAGS = {
    "SSE42": "sse4_2",
    "AVX": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "BMI2": "bmi2",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512bw",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
}


@cache
def library_dir() -> Path:
    """Folder of the patched libraries. Raises NativeError if they were not built."""
    spec = importlib.util.find_spec("llama_expert_pack.bridge._provider")
    if spec is None or spec.origin is None:
        raise NativeError(f"{Path(__file__).parent}: the native part of llama-expert-pack is not built: {REBUILD}")
    folder = Path(spec.origin).parent / "lib"
    if not (folder / "libllama.so").exists():
        raise NativeError(f"{folder}: expected libllama.so and its companions, found none: {REBUILD}")
    return folder


def build_info() -> dict[str, Any]:
    """What the libraries were built from and for: ``source`` (name, version, sha256), ``cpu_features``, ``cuda``."""
    path = library_dir() / "build_info.json"
    try:
        info: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NativeError(f"{path}: can't be read ({error}): {REBUILD}") from error
    return info


def check_cpu(needed: list[str], cpuinfo: str) -> None:
    """Raises NativeError if the libraries use instructions that this processor lacks."""
    flags = {
        flag for line in cpuinfo.splitlines() if line.startswith("flags") for flag in line.split(":", 1)[1].split()
    }
    missing = [name for name in needed if name in _CPU_FLAGS and _CPU_FLAGS[name] not in flags]
    if flags and missing:
        raise NativeError(
            f"{library_dir()}: the libraries were built for a processor with {', '.join(missing)}, "
            f"which this one lacks: {REBUILD}"
        )


def check_struct_sizes(llama_cpp: ModuleType, native: ctypes.CDLL) -> None:
    """The binding's hand-written structs must be the library's. Raises NativeError."""
    size_of = native.llama_expert_struct_size
    size_of.argtypes, size_of.restype = [ctypes.c_char_p], ctypes.c_size_t
    for name in ("llama_model_params", "llama_context_params", "llama_batch", "llama_model_kv_override"):
        expected, found = size_of(name.encode()), ctypes.sizeof(getattr(llama_cpp, name))
        if expected != found:
            raise NativeError(
                f"llama-cpp-python and the libraries in {library_dir()} do not belong together: {name} has {found} and "
                f"{expected} bytes: {REBUILD}"
            )


def check_native() -> None:
    """Proves that the native libraries fit this processor and this package. Raises NativeError."""
    folder = _runnable_dir()
    try:
        from ._provider import lib
    except ImportError as error:
        raise NativeError(f"the provider module can't be loaded ({error}): {REBUILD}") from error
    if lib.expert_abi_version() != lib.EXPERT_ABI_VERSION:
        raise NativeError(
            f"{folder}: the library speaks provider ABI {lib.expert_abi_version()}, the bridge "
            f"{lib.EXPERT_ABI_VERSION}: {REBUILD}"
        )


def offer() -> None:
    """Lets llama_cpp, imported later by whomever, take the patched libraries. Raises NativeError if they can't run here."""
    if "llama_cpp" not in sys.modules:
        os.environ.setdefault("LLAMA_CPP_LIB_PATH", str(_runnable_dir()))


def _runnable_dir() -> Path:
    folder = library_dir()
    if Path("/proc/cpuinfo").exists():
        check_cpu(build_info()["cpu_features"], Path("/proc/cpuinfo").read_text())
    return folder


@cache
def load() -> ModuleType:
    """Imports llama_cpp on the patched libraries, once. Raises NativeError with what to do."""
    from importlib.metadata import PackageNotFoundError, version

    folder = library_dir()
    with openmp.short_spin():
        check_native()
    needed = build_info()["source"].split()[1]
    try:
        found = version("llama-cpp-python")
    except PackageNotFoundError:
        found = "none"
    if found != needed:
        raise NativeError(
            f"llama-cpp-python {needed} is needed, {found} is installed: pip install llama-cpp-python=={needed}"
        )
    if "llama_cpp" not in sys.modules:
        os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
    with openmp.short_spin():
        import llama_cpp
    import llama_cpp.llama_cpp as binding

    loaded = Path(binding._lib._name).resolve()
    if loaded.parent != folder.resolve():
        raise NativeError(
            f"llama_cpp was imported earlier with {loaded}: import llama_expert_pack before llama_cpp, and without "
            "LLAMA_CPP_LIB_PATH, so that both use the patched libraries"
        )
    check_struct_sizes(llama_cpp, binding._lib)
    return llama_cpp
