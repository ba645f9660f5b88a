"""What the runtime tests share: small models with packs, tokens, and faults on the way from the disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lab.stock import ROOT, STOCK_LIB, environment
from lab.variants import VARIANTS
from llama_expert_pack import Llama
from llama_expert_pack.bridge.provider import Provider
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.drive.direct_io import pread_into
from llama_expert_pack.pypack.errors import DecodeError
from llama_expert_pack.pypack.format.pack import Pack

SMALL: dict[str, Any] = {
    "n_ctx": 256,
    "n_batch": 64,
    "n_threads": 1,
    "n_threads_batch": 1,
    "logits_all": True,
    "verbose": False,
}


def variant(name: str, folder: Path) -> Path:
    """A model of lab/variants.py with its pack beside it."""
    path = VARIANTS[name](folder)
    convert(path)
    return path


def upstream_model(name: str, folder: Path) -> Path:
    """A model that upstream's test-llama-archs writes, with its pack beside it."""
    command = [str(STOCK_LIB / "test-llama-archs"), "-o", str(folder), "-s", "42", "-a", name.removesuffix("-moe")]
    subprocess.run(command, check=True, capture_output=True)
    path = folder / f"{name}.gguf"
    convert(path)
    return path


def load(path: Path, **options: Any) -> Llama:
    if options.setdefault("expert_pack", True) not in (None, False):
        options.setdefault("expert_cache_reserve", 0)
    return Llama(str(path), **{**SMALL, **options})


@contextmanager
def loaded(path: Path, **options: Any) -> Iterator[Llama]:
    llm = load(path, **options)
    try:
        yield llm
    finally:
        llm.close()


def provider_of(llm: Llama) -> Provider:
    assert llm._provider is not None
    return llm._provider


def tokens_at(start: int, n: int, n_vocab: int = 128) -> list[int]:
    return [(7 * i + i * i) % n_vocab for i in range(start, start + n)]


def evaluate(llm: Any, batches: Sequence[int]) -> np.ndarray:
    """Logits as bits, [sum of batches, n_vocab]."""
    for n in batches:
        llm.eval(tokens_at(llm.n_tokens, n, llm.n_vocab()))
    return bits(llm)


def bits(llm: Llama) -> np.ndarray:
    scores: np.ndarray = llm.scores[: llm.n_tokens].copy()
    return scores.view(np.uint32)


def run_python(
    code: str, *arguments: object, stock: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process that imports this repository; it must not die of a signal."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    env = environment(stock) | variables
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert run.returncode >= 0, f"signal {-run.returncode}\n{run.stderr[-3000:]}"
    return run


# ---- faults: what pread does instead, (fd, buffer, offset) -> bytes read

Pread = Callable[[int, memoryview, int], int]


def refused(code: int) -> Pread:
    def pread(fd: int, buffer: memoryview, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    return pread


def short_read(fd: int, buffer: memoryview, offset: int) -> int:
    """The file seems to end in the middle of the block."""
    return pread_into(fd, buffer[: len(buffer) // 8192 * 4096], offset) if len(buffer) > 4096 else 0


def flipped_byte(fd: int, buffer: memoryview, offset: int) -> int:
    n = pread_into(fd, buffer, offset)
    buffer[n // 2] ^= 1
    return n


FAULTS: dict[str, Pread] = {
    "EIO": refused(errno.EIO),
    "EINVAL": refused(errno.EINVAL),
    "short-read": short_read,
    "flipped-byte": flipped_byte,
}


@contextmanager
def reads(llm: Llama, fault: Pread, *, after: int = 0, times: int | None = None) -> Iterator[list[int]]:
    """Lets ``after`` reads pass, then breaks ``times`` of them, or all. Gives the offsets of the broken ones.

    Native leaves all reads to the provider meanwhile.
    """
    reader, blocks = provider_of(llm)._reader, provider_of(llm).blocks
    usual, seen, fds = reader._pread, [0], blocks["fd"].copy()
    broken: list[int] = []

    def pread(fd: int, buffer: memoryview, offset: int) -> int:
        seen[0] += 1
        if seen[0] <= after or (times is not None and len(broken) >= times):
            return usual(fd, buffer, offset)
        broken.append(offset)
        return fault(fd, buffer, offset)

    reader._pread = pread
    blocks["fd"] = -1
    try:
        yield broken
    finally:
        reader._pread = usual
        blocks["fd"] = fds


def flip_byte(path: Path, offset: int) -> None:
    """Of a file on the disk; once more to mend it."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


def flip_every_block(pack: Pack) -> None:
    for layer in pack.layers:
        for expert in range(layer.n_expert):
            flip_byte(pack.path, pack.offset(layer.index, expert) + layer.block_bytes // 2)


def decode_error(call: Callable[[], Any]) -> str:
    """The text of the DecodeError that the call must raise."""
    try:
        call()
    except DecodeError as error:
        return str(error)
    raise AssertionError("the call returned")
