"""No pack that is damaged, unfinished, mixed up or made to deceive is ever opened."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import PackError
from llama_expert_pack.pypack.format.pack import open_pack
from tests.gguf_bytes import GGUF, facts, moe_tensors, tiny_moe
from tests.pack_tools import manifest_of, resign

Json = dict[str, Any]
HUGE = 1 << 63


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack whose two layers differ in experts and types."""
    model = GGUF(facts(), [*moe_tensors(0, n_expert=4), *moe_tensors(1, n_expert=3, types=(1, 1, 8))])
    path = model.write(tmp_path_factory.mktemp("good") / "model.gguf")
    return convert(path, safety_margin_bytes=0).path


@pytest.fixture
def pack(good: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    shutil.copy(manifest_of(good), tmp_path)
    return Path(shutil.copy(good, tmp_path))


def refuse(pack: Path, sentence: str) -> None:
    with pytest.raises(PackError, match=sentence) as caught:
        open_pack(pack)
    assert "\n" not in str(caught.value)
    assert str(pack) in str(caught.value)


def edit_manifest(pack: Path, edit: Callable[[Json], object]) -> None:
    facts = json.loads(manifest_of(pack).read_text())
    edit(facts)
    manifest_of(pack).write_text(json.dumps(facts))


def patch(pack: Path, offset: int, data: bytes | bytearray) -> None:
    with open(pack, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_the_good_one(pack: Path) -> None:
    resign(pack)
    assert open_pack(pack).n_keys == 7


def test_missing(tmp_path: Path) -> None:
    refuse(tmp_path / "a.expert-pack", "does not exist")


def test_folder(tmp_path: Path) -> None:
    refuse(tmp_path, "is a folder")


def test_no_manifest(pack: Path) -> None:
    manifest_of(pack).unlink()
    refuse(pack, "has no manifest")


def test_zero_header(pack: Path) -> None:
    patch(pack, 0, bytes(4096))
    refuse(pack, "unfinished pack")


def test_zero_index(pack: Path) -> None:
    patch(pack, 4096, bytes(4096))
    refuse(pack, "index is damaged")


def test_other_file(pack: Path) -> None:
    patch(pack, 0, b"GGUF")
    refuse(pack, "is not an expert pack: it starts with b'GGUFPACK'")


def test_newer_version(pack: Path) -> None:
    resign(pack, header=lambda fields: fields.__setitem__(1, 2))
    refuse(pack, "has pack version 2")


def test_every_shorter_file(pack: Path) -> None:
    size = pack.stat().st_size
    for end in (size - 1, size - 4096, 8192, 4100, 4096):
        os.truncate(pack, end)
        refuse(pack, f"has {end} bytes instead of {size}")
    for end in (4095, 100, 0):
        os.truncate(pack, end)
        refuse(pack, "too short")


def test_longer_file(pack: Path) -> None:
    os.truncate(pack, pack.stat().st_size + 4096)
    refuse(pack, "bytes instead of")


def test_every_byte_of_header_and_index(pack: Path) -> None:
    """Whatever byte in front of the blocks changes, the pack is refused."""
    data = bytearray(pack.read_bytes())
    places = [*range(200), *range(200, 4096, 97), *range(4096, 4096 + 7 * 40), 4500, 8191]
    for place in places:
        for flip in (1, 0x80):
            patch(pack, place, bytes([data[place] ^ flip]))
            refuse(pack, ".")
        patch(pack, place, data[place : place + 1])
    open_pack(pack)


def test_any_byte_of_the_manifest(pack: Path) -> None:
    """A changed byte (every fifth is tried) is refused, unless it is white space between values."""
    path = manifest_of(pack)
    data = path.read_bytes()
    facts = json.loads(data)
    for place in range(0, len(data), 5):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        try:
            same = json.loads(changed) == facts
        except ValueError:
            same = False
        if same:
            open_pack(pack)
        else:
            refuse(pack, ".")


def test_manifest_of_another_pack(pack: Path, tmp_path: Path) -> None:
    other = convert(tiny_moe().write(tmp_path / "other.gguf"), safety_margin_bytes=0).path
    shutil.copy(manifest_of(other), manifest_of(pack))
    refuse(pack, "was changed or belongs to another pack")


def test_manifest_of_the_same_model_converted_elsewhere(pack: Path) -> None:
    """Same layers, same source, but another header: the digests may differ."""
    edit_manifest(pack, lambda m: m.update(header_sha256="0" * 64))
    refuse(pack, "header_sha256 is not that of")


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{", b"\xff\xfe", b'"x"', b"[" * 100_000])
def test_manifest_that_is_no_manifest(data: bytes, pack: Path) -> None:
    manifest_of(pack).write_bytes(data)
    refuse(pack, "is not a valid manifest")


def test_huge_manifest(pack: Path) -> None:
    os.truncate(manifest_of(pack), (64 << 20) + 1)
    refuse(pack, "larger than")


def layer(index: int, /, **fields: object) -> Callable[[Json], object]:
    return lambda m: m["layers"][index].update(fields)


def role(index: int, /, **fields: object) -> Callable[[Json], object]:
    return lambda m: m["layers"][0]["roles"][index].update(fields)


def top(**fields: object) -> Callable[[Json], object]:
    return lambda m: m.update(fields)


def all_shapes(ne: list[int]) -> Callable[[Json], object]:
    def edit(manifest: Json) -> None:
        for found in manifest["layers"][0]["roles"]:
            found["ne"] = ne

    return edit


def file_name(name: str) -> Callable[[Json], object]:
    return lambda m: m["files"][0].update(name=name)


WRONG_MANIFESTS: dict[str, tuple[Callable[[Json], object], str]] = {
    "unknown-field": (top(extra=1), "unknown field `extra`"),
    "unknown-field-in-layer": (layer(0, extra=1), "unknown field `extra`"),
    "unknown-field-in-role": (role(0, extra=1), "unknown field `extra`"),
    "missing-field": (lambda m: m.pop("source"), "missing required field `source`"),
    "missing-field-in-layer": (lambda m: m["layers"][0].pop("roles"), "missing required field `roles`"),
    "no-data-offset": (lambda m: m["layers"][0].pop("data_offset"), "data_offset is 0"),
    "text-for-number": (layer(0, n_expert="4"), "Expected `int`, got `str`"),
    "fraction-for-number": (layer(0, n_expert=4.5), "Expected `int`, got `float`"),
    "true-for-number": (layer(0, n_expert=True), "Expected `int`, got `bool`"),
    "null": (top(layers=None), "Expected `array`, got `null`"),
    "format": (top(format="gguf"), "format is 'gguf'"),
    "version": (top(version=2), "version is 2"),
    "version-negative": (top(version=-1), "Expected `int` >= 0"),
    "not-complete": (top(complete=False), "marked as not complete"),
    "alignment-zero": (top(alignment=0), "alignment is 0"),
    "alignment-512": (top(alignment=512), "alignment is 512"),
    "no-files": (top(files=[]), "has exactly one file, found 0"),
    "two-files": (lambda m: m["files"].append(m["files"][0]), "has exactly one file, found 2"),
    "file-absolute": (file_name("/etc/passwd"), "'/etc/passwd' is not a plain name"),
    "file-escape": (file_name("../model.expert-pack"), "is not a plain name"),
    "file-backslash": (file_name("..\\model.expert-pack"), "is not a plain name"),
    "file-dots": (file_name(".."), "'..' is not a plain name"),
    "file-dot": (file_name("."), "is not a plain name"),
    "file-empty": (file_name(""), "'' is not a plain name"),
    "file-zero-byte": (file_name("a\0b"), "is not a plain name"),
    "file-newline": (file_name("a\nb"), "is not a plain name"),
    "file-long": (file_name("x" * 256), "is not a plain name"),
    "shard-escape": (lambda m: m["source"]["shards"][0].update(name="a/b"), "'a/b' is not a plain name"),
    "no-shards": (lambda m: m["source"].update(shards=[]), "has no shards"),
    "hash-short": (lambda m: m["source"].update(trunk_sha256="00"), "matching regex"),
    "hash-upper": (lambda m: m["source"].update(trunk_sha256="A" * 64), "matching regex"),
    "file-size": (lambda m: m["files"][0].update(size_bytes=4096), "file size is 4096 instead of"),
    "file-size-overflow": (lambda m: m["files"][0].update(size_bytes=HUGE), "<= 9223372036854775807"),
    "no-layers": (top(layers=[]), "has no layers"),
    "layer-twice": (lambda m: m["layers"].append(m["layers"][1]), "strictly rising order"),
    "layers-swapped": (lambda m: m["layers"].reverse(), "strictly rising order"),
    "layer-index": (layer(1, index=2), "layer 1: index is 2 instead of 1"),
    "layer-group": (layer(0, group="shexp"), "unknown group 'shexp'"),
    "layer-block": (layer(0, block=-1), "block number -1 is out of range"),
    "layer-block-other": (layer(1, block=2), "tensor is 'blk.1"),
    "layer-experts": (layer(0, n_expert=5), "is not that of 5 experts"),
    "layer-first-key": (layer(1, first_key=3), "first_key is 3 instead of 4"),
    "layer-block-bytes": (layer(0, block_bytes=4096), "block_bytes is 4096 instead of"),
    "layer-offset": (layer(0, data_offset=4096), "data_offset is 4096 instead of 8192"),
    "layer-offset-negative": (layer(0, data_offset=-4096), "data_offset is -4096 instead of 8192"),
    "layers-overlap": (lambda m: m["layers"][1].update(data_offset=8192), "layer 1: data_offset is 8192"),
    "layer-no-roles": (layer(0, roles=[]), r"roles \[\] are not a selection"),
    "role-name": (role(0, name="router"), "are not a selection"),
    "role-twice": (
        lambda m: m["layers"][0].update(roles=[m["layers"][0]["roles"][0]] * 2),
        "not a selection",
    ),
    "roles-swapped": (lambda m: m["layers"][0]["roles"].reverse(), "not a selection"),
    "role-tensor": (role(0, tensor="output.weight"), "tensor is 'output.weight' instead of 'blk.0.ffn_gate"),
    "role-type-unknown": (role(0, type=9999), "unknown ggml type 9999"),
    "role-type-other": (role(0, type=1), "type 1 is named 'F32' instead of 'F16'"),
    "role-type-name": (role(0, type_name="Q4_K"), "type 0 is named 'Q4_K'"),
    "role-shape-zero": (role(0, ne=[0, 32, 4]), r"shape \[0, 32, 4\] is impossible"),
    "role-shape-negative": (role(0, ne=[64, -32, 4]), "is impossible"),
    "role-shape-two": (role(0, ne=[64, 32]), "Expected `array` of length 3"),
    "role-shape-experts": (role(0, ne=[64, 32, 5]), "is not that of 4 experts"),
    "role-shape-overflow": (all_shapes([1 << 40, 1 << 40, 4]), "overflows 63 bits"),
    "role-shape-bigger": (role(0, ne=[64, 64, 4]), "instead of"),
    "role-number-overflow": (role(0, ne=[1 << 70, 1, 4]), "overflows 63 bits"),
    "role-bytes": (role(0, bytes=1), "roles is"),
    "role-offset": (role(1, offset=256), "roles is"),
    "role-offset-unaligned": (role(1, offset=1), "roles is"),
    "pack-overflow": (all_shapes([1 << 30, 1 << 28, 4]), "instead of|overflows"),
}


@pytest.mark.parametrize("name", WRONG_MANIFESTS)
def test_wrong_manifest(name: str, pack: Path) -> None:
    """Refused for what is wrong, whether or not somebody made the hashes right again."""
    edit, sentence = WRONG_MANIFESTS[name]
    resign(pack, manifest=edit)
    refuse(pack, sentence)


def header_field(number: int, value: int) -> Callable[[list[Any]], object]:
    return lambda fields: fields.__setitem__(number, value)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        (2, 512, "header is damaged"),
        (3, 512, "has alignment 512"),
        (4, 3, "has n_layers 3"),
        (5, 6, "index outside its bounds"),
        (5, (1 << 64) - 1, "index outside its bounds"),
        (6, 0, "index outside its bounds"),
        (6, 1 << 63, "index outside its bounds"),
        (7, 1 << 63, "index outside its bounds"),
        (8, 4096, "has data_start 4096"),
        (9, 4096, "bytes instead of 4096"),
    ],
)
def test_wrong_header(field: int, value: int, sentence: str, pack: Path) -> None:
    resign(pack, header=header_field(field, value))
    refuse(pack, sentence)


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        (0, 1, "entry 2 has file_id 1 instead of 0"),
        (1, 1, "entry 2 has reserved 1"),
        (2, 0, "entry 2 has offset 0"),
        (2, 8192, "entry 2 has offset 8192"),
        (2, 1 << 63, "entry 2 has offset 9223372036854775808"),
        (3, 0, "entry 2 has length 0"),
        (3, (1 << 64) - 1, "entry 2 has length 18446744073709551615"),
    ],
)
def test_wrong_index(column: int, value: int, sentence: str, pack: Path) -> None:
    resign(pack, index=lambda entries: entries[2].__setitem__(column, value))
    refuse(pack, sentence)


def test_fewer_keys_in_header_and_index(pack: Path) -> None:
    def shrink(fields: list[Any]) -> None:
        fields[5], fields[7] = 6, 240

    resign(pack, header=shrink)
    refuse(pack, "index is damaged|not zero")
