"""The manifest: NAME.expert-pack.manifest.json, everything about a pack but the experts' digests.

It is strict: unknown or missing fields, wrong types and numbers outside 0 .. 2^63-1 are refused, and what can
be computed from something else (offsets, sizes, keys) must be exactly what the computation gives.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

from .._version import __version__
from ..errors import PackError
from ..ggml_types import GGML_TYPES
from .header import ENTRY_BYTES, HEADER_BYTES, VERSION
from .layout import ALIGNMENT, GROUP_ORDER, ROLE_ORDER, Layer, Role, Weight, lay_out_pack

FORMAT = "llama-expert-pack"
BUILDER = f"llama-expert-pack {__version__}"
MAX_MANIFEST_BYTES = 64 << 20
_INT64_MAX = (1 << 63) - 1
_MAX_KEYS = (1 << 31) - 1

Count = Annotated[int, msgspec.Meta(ge=0, le=_INT64_MAX)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]  # "$" would let a newline follow


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class PackFile(_Strict, frozen=True):
    """A file that holds blocks: its plain name beside the manifest, and its size."""

    name: str
    size_bytes: Count


class SourceShard(_Strict, frozen=True):
    """A shard of the GGUF; ``head_sha256`` covers its header, metadata and tensor table."""

    name: str
    size_bytes: Count
    head_sha256: Sha256


class Source(_Strict, frozen=True):
    """Fingerprint of the GGUF. ``trunk_sha256`` covers a sample of every tensor that is not packed."""

    shards: tuple[SourceShard, ...]
    trunk_sha256: Sha256


class ModelFacts(_Strict, frozen=True):
    """What the metadata says, 0 if nothing. ``expert_used_count``: most experts a token uses in a layer."""

    architecture: str
    name: str
    block_count: Count
    expert_count: Count
    expert_used_count: Count


class Manifest(_Strict, frozen=True):
    """``header_sha256`` covers the pack's header page, which in turn covers index and manifest."""

    format: str
    version: Count
    complete: bool
    alignment: Count
    files: tuple[PackFile, ...]
    source: Source
    model: ModelFacts
    layers: tuple[Layer, ...]
    builder: str
    header_sha256: str


def canonical_sha256(manifest: Manifest) -> bytes:
    """sha256 of the manifest without ``header_sha256``, in compact JSON with fields in declared order."""
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(manifest, header_sha256=""))).digest()


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of the manifest's file: indented JSON in UTF-8."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode_manifest(data: bytes, path: Path) -> Manifest:
    """Decodes and validates a manifest. Raises PackError, its text naming ``path``."""
    found = _decode(data)
    if isinstance(found, str):
        raise PackError(f"{path} {found}: convert the model again")
    return found


def unreadable(manifest: Manifest) -> str | None:
    """Why no reader would accept this manifest once it is written, as part of a sentence; None if one would."""
    found = _decode(encode_manifest(manifest))
    return found if isinstance(found, str) else None


def _decode(data: bytes) -> Manifest | str:
    """The manifest, or what is wrong with it."""
    if len(data) > MAX_MANIFEST_BYTES:
        return f"is larger than {MAX_MANIFEST_BYTES} bytes"
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"is not a valid manifest: {error}"
    problem = _problem(manifest)
    return f"is not a valid manifest: {problem}" if problem else manifest


def _problem(manifest: Manifest) -> str | None:
    """The first thing that is wrong with a manifest, or None."""
    if manifest.format != FORMAT:
        return f"format is {manifest.format!r} instead of {FORMAT!r}"
    if manifest.version != VERSION:
        return f"version is {manifest.version}, this package reads version {VERSION}"
    if not manifest.complete:
        return "the pack is marked as not complete"
    if manifest.alignment != ALIGNMENT:
        return f"alignment is {manifest.alignment} instead of {ALIGNMENT}"
    if len(manifest.files) != 1:
        return f"version {VERSION} has exactly one file, found {len(manifest.files)}"
    if not manifest.source.shards:
        return "the source has no shards"
    names = [f.name for f in manifest.files] + [s.name for s in manifest.source.shards]
    for name in names:
        if not is_plain_name(name):
            return f"file name {name!r} is not a plain name beside the manifest"
    return _layers_problem(manifest) or _size_problem(manifest)


def is_plain_name(name: str) -> bool:
    """Whether a name stays in its folder on every system: no separators, no dots alone, no control bytes."""
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError:
        return False
    harmful = any(c in "/\\" or ord(c) < 32 or ord(c) == 127 for c in name)
    return 0 < n_bytes <= 255 and name not in (".", "..") and not harmful


def _layers_problem(manifest: Manifest) -> str | None:
    layers = manifest.layers
    if not layers:
        return "it has no layers"
    for layer in layers:
        problem = _layer_problem(layer)
        if problem:
            return f"layer {layer.index}: {problem}"
    order = [(layer.block, GROUP_ORDER.index(layer.group)) for layer in layers]
    if order != sorted(set(order)):
        return "layers are not in strictly rising order of (block, group)"
    expected = lay_out_pack(
        ((layer.block, layer.group, map(_weight, layer.roles)) for layer in layers), HEADER_BYTES, ENTRY_BYTES
    )
    for layer, computed in zip(layers, expected, strict=True):
        for field in Layer.__struct_fields__:
            found, wanted = getattr(layer, field), getattr(computed, field)
            if found != wanted:
                return f"layer {computed.index}: {field} is {found} instead of {wanted}"
    if layers[-1].first_key + layers[-1].n_expert > _MAX_KEYS:
        return f"it has more than {_MAX_KEYS} experts"
    return None


def _layer_problem(layer: Layer) -> str | None:
    if layer.group not in GROUP_ORDER:
        return f"unknown group {layer.group!r}"
    if not 0 <= layer.block <= _MAX_KEYS:
        return f"block number {layer.block} is out of range"
    names = [role.name for role in layer.roles]
    if not names or names != [name for name in ROLE_ORDER if name in names]:
        return f"roles {names} are not a selection of {list(ROLE_ORDER)} in that order"
    for role in layer.roles:
        problem = _role_problem(layer, role)
        if problem:
            return f"role {role.name!r}: {problem}"
    return None


def _role_problem(layer: Layer, role: Role) -> str | None:
    tensor = f"blk.{layer.block}.ffn_{role.name}_{layer.group}.weight"
    if role.tensor != tensor:
        return f"tensor is {role.tensor!r} instead of {tensor!r}"
    if role.type not in GGML_TYPES:
        return f"unknown ggml type {role.type} (it needs a newer version of this package)"
    traits = GGML_TYPES[role.type]
    if role.type_name != traits.name:
        return f"type {role.type} is named {role.type_name!r} instead of {traits.name!r}"
    columns, rows, experts = role.ne
    if min(role.ne) < 1 or columns % traits.block_values:
        return f"shape {list(role.ne)} is impossible for {traits.name}"
    if experts != layer.n_expert:
        return f"shape {list(role.ne)} is not that of {layer.n_expert} experts"
    if columns * rows * experts * traits.block_bytes > _INT64_MAX:
        return f"shape {list(role.ne)} overflows 63 bits"
    return None


def _size_problem(manifest: Manifest) -> str | None:
    last = manifest.layers[-1]
    end = last.data_offset + last.n_expert * last.block_bytes
    if end > _INT64_MAX:
        return "the pack's size overflows 63 bits"
    if manifest.files[0].size_bytes != end:
        return f"file size is {manifest.files[0].size_bytes} instead of {end}"
    return None


def _weight(role: Role) -> Weight:
    return Weight(role.name, role.tensor, role.type, role.ne)
