"""The limit for experts that go from a drive to a GPU: direct reads into page-locked memory, each copied on at once.

Nothing else is done with the bytes: no cache, no checksum, no computation. Threads keep reads and copies in flight all
the time, unlike a layer that asks for two or three experts and then computes.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np

from pypack.errors import UsageError
from pypack.pack import Pack

_HOST_TO_DEVICE = 1


def _cudart() -> ctypes.CDLL:
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UsageError("the CUDA runtime library (libcudart.so) was not found")


class _Cuda:
    def __init__(self) -> None:
        self._lib = _cudart()

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            raise UsageError(f"{name} failed with CUDA error {code}")

    def pointer(self, allocate: str, n_bytes: int, *flags: int) -> ctypes.c_void_p:
        place = ctypes.c_void_p()
        self.call(allocate, ctypes.byref(place), ctypes.c_size_t(n_bytes), *flags)
        return place


def raw_delivery_rate(pack: Pack, n_blocks: int = 512, n_threads: int = 16) -> float:
    """Bytes/s of random whole blocks of the pack's largest size, read with O_DIRECT and copied to the GPU."""
    cuda = _Cuda()
    keys = [(layer.index, expert) for layer in pack.layers for expert in range(layer.n_expert)]
    order = np.random.default_rng(11).permutation(len(keys))[:n_blocks]
    block_bytes = max(layer.block_bytes for layer in pack.layers)
    chosen = [pack.extents(*keys[i])[0] for i in order]
    files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in pack.files]
    buffers = [cuda.pointer("cudaHostAlloc", block_bytes, 0) for _ in range(n_threads)]
    places = [cuda.pointer("cudaMalloc", block_bytes) for _ in range(n_threads)]

    def work(index: int) -> None:
        host, device = buffers[index], places[index]
        memory = (ctypes.c_char * block_bytes).from_address(host.value or 0)
        stream = ctypes.c_void_p()
        cuda.call("cudaStreamCreate", ctypes.byref(stream))
        for extent in chosen[index::n_threads]:
            view = memoryview(memory).cast("B")[: extent.length]
            n = os.preadv(files[extent.file_id], [view], extent.offset)
            if n != extent.length:
                raise UsageError(f"{pack.files[extent.file_id]}: expected {extent.length} bytes, found {n}")
            size = ctypes.c_size_t(extent.length)
            cuda.call("cudaMemcpyAsync", device, host, size, ctypes.c_int(_HOST_TO_DEVICE), stream)
            cuda.call("cudaStreamSynchronize", stream)
        cuda.call("cudaStreamDestroy", stream)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - start
    for place in places:
        cuda.call("cudaFree", place)
    for buffer in buffers:
        cuda.call("cudaFreeHost", buffer)
    for fd in files:
        os.close(fd)
    return sum(extent.length for extent in chosen) / elapsed_s
