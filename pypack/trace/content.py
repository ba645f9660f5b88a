"""The content of a trace's file, compressed or not, as long as there is memory for what is made of it."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

from ..errors import TraceError
from ..system.host_memory import host_memory_free
from ..system.regular_file import open_regular

MEMORY_FACTOR = 24  # bytes that checking and replaying take at most for a byte of the trace
_XZ_BYTES, _XZ_RATIO = 64 << 20, 32  # runs compress 14-fold, or a bit more: what goes beyond is meant to fill memory
_PIECE_BYTES = 1 << 20


def read_content(path: str | os.PathLike[str]) -> bytes | bytearray:
    """All bytes, decompressed if the name ends in .xz. Raises :class:`TraceError`."""
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            limit = host_memory_free() // MEMORY_FACTOR
            if Path(path).suffix == ".xz":
                with lzma.open(file) as content:
                    return _read_up_to(content, min(limit, _XZ_BYTES + _XZ_RATIO * size), path)
            if size > limit:
                raise _too_large(path, limit)
            return file.read()
    except OSError as error:
        raise TraceError(f"{path}: the trace can't be read: {error.strerror or error}") from error
    except (lzma.LZMAError, EOFError) as error:
        raise TraceError(f"{path} is not a whole xz file: {error}: copy or record it again") from error


def _read_up_to(content: lzma.LZMAFile, limit: int, path: object) -> bytearray:
    data = bytearray()
    while piece := content.read(_PIECE_BYTES):
        data += piece
        if len(data) > limit:
            raise _too_large(path, limit)
    return data


def _too_large(path: object, limit: int) -> TraceError:
    return TraceError(
        f"{path} holds more than the {limit >> 20} MiB that can be read here: "
        "free memory, decompress an .xz first if it is yours, or record a shorter run"
    )
