"""Reads what a GGUF says about itself: metadata scalars and where each tensor lies. Never reads tensor data.

A model is one file, or shards NAME-00001-of-0000N.gguf whose split.* keys must agree with their names.
Everything a file claims is checked against what it is before it is used, so that a damaged or hostile file
ends in one GGUFError, not in a crash, a huge allocation or a wrong read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import GGUFError
from ..system.os_errors import os_errors
from ..values.checks import check_path
from .head import Head, Tensor, read_head

SHARD_NAME = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
MAX_SHARDS = 65_535  # split.count is 16 bits wide


@dataclass(frozen=True)
class Shard:
    """One file of a model. ``head_sha256`` covers header, metadata and tensor table, not the data."""

    path: Path
    size_bytes: int
    head_sha256: str

    @property
    def name(self) -> str:
        """The file's name, without its folder."""
        return self.path.name


@dataclass(frozen=True)
class GGUFModel:
    """A whole model: its shards in order, scalar metadata of the first shard, and every tensor by name."""

    path: Path
    shards: tuple[Shard, ...]
    metadata: dict[str, bool | int | float | str | tuple[int | float, ...]]
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        """``general.architecture``; "" if the GGUF does not say."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def name(self) -> str:
        """``general.name``; "" if the GGUF does not say."""
        return str(self.metadata.get("general.name", ""))


def model_stem(path: str | os.PathLike[str]) -> str:
    """The model's name without ``.gguf`` and without the shard suffix ``-00001-of-000NN``."""
    name = Path(path).name
    match = SHARD_NAME.fullmatch(name)
    return match["prefix"] if match else name.removesuffix(".gguf")


def read_model(path: str | os.PathLike[str]) -> GGUFModel:
    """Reads the heads of all shards of the model whose only or first file is ``path``.

    Raises GGUFError, UsageError for an impossible path, or ReadError if the operating system refuses.
    """
    first_path = Path(check_path("the path of the model", path))
    with os_errors(first_path):
        return _read_model(first_path)


def _read_model(first_path: Path) -> GGUFModel:
    first = read_head(first_path, 0)
    count = _split_value(first_path, first, "split.count", default=1)
    if count <= 1:
        _check_single(first_path)
        heads = [(first_path, first)]
    else:
        heads = [(first_path, first), *_other_heads(first_path, first, count)]
        _check_tensor_count(heads)
    return GGUFModel(
        path=first_path,
        shards=tuple(Shard(p, head.size_bytes, head.sha256) for p, head in heads),
        metadata=first.metadata,
        tensors=_merge_tensors(heads),
    )


def _check_single(path: Path) -> None:
    match = SHARD_NAME.fullmatch(path.name)
    if match and int(match["count"]) > 1:
        raise GGUFError(
            f"{path} is named as shard {int(match['no'])} of {int(match['count'])} but its metadata has no "
            "split.count: give a complete model its plain name, or split it with llama-gguf-split"
        )


def _other_heads(first_path: Path, first: Head, count: int) -> list[tuple[Path, Head]]:
    """Heads of shards 2..count, found by name beside the first (beside the link, if that is one)."""
    number = _split_value(first_path, first, "split.no")
    match = SHARD_NAME.fullmatch(first_path.name)
    if number != 0:
        hint = f"{match['prefix']}-00001-of-{count:05d}.gguf" if match else "the file ending in -00001-of-..."
        raise GGUFError(f"{first_path} is shard {number + 1} of {count}, not the first: give {hint} instead")
    if count > MAX_SHARDS or not match or (int(match["no"]), int(match["count"])) != (1, count):
        raise GGUFError(
            f"{first_path} is the first of {count} shards by its metadata, but is not named "
            f"NAME-00001-of-{count:05d}.gguf: give all shards their original names"
        )
    paths = [first_path.with_name(f"{match['prefix']}-{no:05d}-of-{count:05d}.gguf") for no in range(2, count + 1)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise GGUFError(
            f"{first_path} has {count} shards, but {missing[0]}{more} is missing beside it: put all shards there"
        )
    heads = [(p, read_head(p, index)) for index, p in enumerate(paths, start=1)]
    for index, (p, head) in enumerate(heads, start=1):
        found = (_split_value(p, head, "split.no"), _split_value(p, head, "split.count"))
        if found != (index, count):
            raise GGUFError(
                f"{p} is named shard {index + 1} of {count}, but is shard {found[0] + 1} of {found[1]} by "
                "its metadata (swapped or renamed shards): restore the original names"
            )
    return heads


def _check_tensor_count(heads: list[tuple[Path, Head]]) -> None:
    path, first = heads[0]
    expected = _split_value(path, first, "split.tensors.count")
    found = sum(len(head.tensors) for _, head in heads)
    if found != expected:
        raise GGUFError(
            f"{path} and its {len(heads) - 1} other shards hold {found} tensors, but split.tensors.count "
            f"says {expected}: shards of different models are mixed; download them again"
        )


def _split_value(path: Path, head: Head, key: str, default: int | None = None) -> int:
    value = head.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise GGUFError(f"{path}: {key} must be a whole number, found {value!r}: the shard is damaged")
    return value


def _merge_tensors(heads: Iterable[tuple[Path, Head]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    owner: dict[str, Path] = {}
    for path, head in heads:
        for tensor in head.tensors:
            if tensor.name in tensors:
                raise GGUFError(
                    f"{path}: tensor {tensor.name!r} is also in {owner[tensor.name].name}: shards overlap; "
                    "download the model again"
                )
            tensors[tensor.name] = tensor
            owner[tensor.name] = path
    return tensors
