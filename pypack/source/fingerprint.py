"""Tells models apart without reading their experts.

Shapes, names and types are in the head, but a fine-tune of the same shape differs only in data. So the
fingerprint also hashes the first page of every tensor that is not packed: norms, routers, attention.
"""

from __future__ import annotations

import hashlib

from ..format.manifest import ModelFacts, Source, SourceShard
from ..gguf.model import GGUFModel
from .discover import ROUTED_NAME
from .samples import SAMPLE_BYTES, read_ranges

MAX_NAME_CHARS = 1000  # of a GGUF's 64 MiB


def source_fingerprint(model: GGUFModel) -> Source:
    """The fingerprint of a model, from its heads and a sample of its trunk. Raises ReadError or OSError."""
    shards = tuple(SourceShard(s.name, s.size_bytes, s.head_sha256) for s in model.shards)
    return Source(shards, _trunk_sha256(model))


def source_difference(recorded: Source, found: Source) -> str | None:
    """How two fingerprints differ, as part of a sentence; None if they agree (file names may differ)."""
    if len(recorded.shards) != len(found.shards):
        return f"it was made from {len(recorded.shards)} file(s), the model has {len(found.shards)}"
    for old, new in zip(recorded.shards, found.shards, strict=True):
        if old.size_bytes != new.size_bytes:
            return f"it was made from {old.name} of {old.size_bytes} bytes, {new.name} has {new.size_bytes}"
        if old.head_sha256 != new.head_sha256:
            return f"the metadata or tensor table of {new.name} differs from the one it was made from"
    if recorded.trunk_sha256 != found.trunk_sha256:
        return "the weights outside the experts differ from those it was made from"
    return None


def model_facts(model: GGUFModel) -> ModelFacts:
    """The facts about a model that a pack carries along."""

    def count(key: str) -> int:
        value = model.metadata.get(f"{model.architecture}.{key}", 0)
        values = value if isinstance(value, tuple) else (value,)
        return max((v for v in values if type(v) is int and 0 <= v < 1 << 32), default=0)  # a bool is none

    return ModelFacts(
        model.architecture,
        model.name[:MAX_NAME_CHARS],
        count("block_count"),
        count("expert_count"),
        count("expert_used_count"),
    )


def _trunk_sha256(model: GGUFModel) -> str:
    sha = hashlib.sha256()
    trunk: list[list[tuple[int, int]]] = [[] for _ in model.shards]
    for tensor in model.tensors.values():
        if not ROUTED_NAME.fullmatch(tensor.name):
            trunk[tensor.file_id].append((tensor.offset, min(SAMPLE_BYTES, tensor.size_bytes)))
    for shard, ranges in zip(model.shards, trunk, strict=True):
        for data in read_ranges(shard.path, sorted(ranges)):
            sha.update(data)
    return sha.hexdigest()
