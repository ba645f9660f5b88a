"""Takes packs apart and puts them together again with valid hashes, by docs/FORMAT.md and nothing else."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<8sIIIIQQQQQ32s32s")
ENTRY = struct.Struct("<IIQQ16s")


def manifest_of(pack: Path) -> Path:
    return Path(str(pack) + ".manifest.json")


def canonical(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest | {"header_sha256": ""}, separators=(",", ":"), ensure_ascii=False).encode()


def resign(
    pack: Path,
    manifest: Callable[[dict[str, Any]], object] | None = None,
    header: Callable[[list[Any]], object] | None = None,
    index: Callable[[list[list[Any]]], object] | None = None,
) -> None:
    """Edits the parts in place and makes all hashes right again, so that only the content can be refused."""
    data = bytearray(pack.read_bytes())
    facts = json.loads(manifest_of(pack).read_text())
    fields = list(HEADER.unpack_from(data))
    start, size = fields[6], fields[7]
    entries = [list(entry) for entry in ENTRY.iter_unpack(data[start : start + size])]
    if index is not None:
        index(entries)
    data[start : start + size] = b"".join(ENTRY.pack(*entry) for entry in entries)
    if manifest is not None:
        manifest(facts)
    fields[10] = hashlib.sha256(data[start : start + size]).digest()
    fields[11] = hashlib.sha256(canonical(facts)).digest()
    if header is not None:
        header(fields)
    data[: HEADER.size] = HEADER.pack(*fields)
    facts["header_sha256"] = hashlib.sha256(data[:4096]).hexdigest()
    pack.write_bytes(data)
    manifest_of(pack).write_text(json.dumps(facts))
