"""Compares a few of the experts' bytes in a model with those in its pack, at the cost of milliseconds.

Another upload or quantization may leave sizes, metadata, tensor table and trunk as they were and change experts only.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

from ..errors import ReadError
from ..format.layout import Layer
from ..gguf.model import GGUFModel
from ..system.regular_file import open_regular

SAMPLE_BYTES = 4096
_EXPERTS = 4  # of each tensor: the first, the last, two between

Range = tuple[int, int]  # offset, bytes


def expert_difference(model: GGUFModel, layers: Sequence[Layer], pack_path: Path) -> str | None:
    """How samples of every expert tensor differ between model and pack, as part of a sentence; None if they agree.

    Raises ReadError, or OSError if a file cannot be opened.
    """
    wanted: dict[int, list[tuple[str, int, Range, Range]]] = {}
    for layer in layers:
        for role in layer.roles:
            tensor = model.tensors[role.tensor]
            for expert, start, n_bytes in _samples(layer.n_expert, role.bytes):
                in_model = (tensor.offset + expert * role.bytes + start, n_bytes)
                in_pack = (layer.data_offset + expert * layer.block_bytes + role.offset + start, n_bytes)
                wanted.setdefault(tensor.file_id, []).append((role.tensor, expert, in_model, in_pack))
    for file_id, samples in wanted.items():
        path = model.shards[file_id].path
        of_model = read_ranges(path, [in_model for _, _, in_model, _ in samples])
        of_pack = read_ranges(pack_path, [in_pack for _, _, _, in_pack in samples])
        for (name, expert, in_model, _), ours, theirs in zip(samples, of_model, of_pack, strict=True):
            if ours != theirs and not _is_punched_out(path, in_model, ours):
                return f"expert {expert} of {name} has other bytes in {path.name}"
    return None


def hole_in_experts(model: GGUFModel, layers: Sequence[Layer]) -> str | None:
    """Where a file of the model has a hole in place of experts, as part of a sentence; None if it has none.

    They were punched out once there was a pack, or the download is not complete. Raises OSError.
    """
    for layer in layers:
        for role in layer.roles:
            tensor = model.tensors[role.tensor]
            path = model.shards[tensor.file_id].path
            at = _next_hole(path, tensor.offset)
            if at < tensor.offset + tensor.size_bytes:
                return f"{path} has a hole at byte {at}, in {role.tensor}"
    return None


def _next_hole(path: Path, offset: int) -> int:
    fd = open_regular(path)
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE)
    finally:
        os.close(fd)


def _is_punched_out(path: Path, place: Range, data: bytes) -> bool:
    """Whether the file has a hole there: whoever has the pack may give the experts' room in the model back."""
    return not any(data) and _next_hole(path, place[0]) < sum(place)


def _samples(n_expert: int, role_bytes: int) -> Iterable[tuple[int, int, int]]:
    """(expert, first byte in its share, bytes): the share's start in the first expert, its end in the last one."""
    n_bytes = min(SAMPLE_BYTES, role_bytes)
    last = min(_EXPERTS, n_expert) - 1
    for i in range(last + 1):
        yield (n_expert - 1) * i // max(last, 1), (role_bytes - n_bytes) * i // max(last, 1), n_bytes


def read_ranges(path: Path, ranges: Sequence[Range]) -> Generator[bytes, None, None]:
    """The bytes of each range of a file. All are asked for at once, and nothing around them is read.

    Raises ReadError, or OSError if the file cannot be opened.
    """
    fd = open_regular(path)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for offset, n_bytes in ranges:
            os.posix_fadvise(fd, offset, n_bytes, os.POSIX_FADV_WILLNEED)
        for offset, n_bytes in ranges:
            try:
                data = os.pread(fd, n_bytes, offset)
            except OSError as error:
                raise ReadError(
                    f"{path} cannot be read at byte {offset}: {error.strerror}", error.errno or 0
                ) from error
            if len(data) != n_bytes:
                raise ReadError(f"{path} was cut short while it was read, at byte {offset + len(data)}")
            yield data
    finally:
        os.close(fd)
