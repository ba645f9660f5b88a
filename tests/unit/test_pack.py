"""The pack format, byte by byte, and what an opened pack says."""

from __future__ import annotations

import hashlib
import json
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import xxhash

from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import PackError, SourceMismatchError
from llama_expert_pack.pypack.format import manifest as manifest_module
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import check_source, find_pack
from tests.gguf_bytes import GGUF, T, facts, moe_tensors, split, tiny_moe
from tests.pack_tools import ENTRY, HEADER, canonical, manifest_of

GOLDEN = Path(__file__).parent / "golden"
COUNTING = bytes((i + i // 256) % 256 for i in range(2048))  # every 512 bytes of it are different


def golden_model() -> GGUF:
    """One block, two experts; one-byte values that count up, so that every byte's place shows."""
    tensors = [
        T("blk.3.ffn_gate_inp.weight", (64, 2), data=COUNTING[:512]),
        T("blk.3.ffn_up_exps.weight", (64, 8, 2), 24, data=COUNTING[:1024]),
        T("blk.3.ffn_down_exps.weight", (8, 64, 2), 24, data=COUNTING[7 : 7 + 1024]),
    ]
    return GGUF(facts("golden", n_expert=2, top_k=1, n_block=4), tensors)


def golden_pack(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(import_module("llama_expert_pack.pypack.convert.convert"), "BUILDER", "golden builder")
    return convert(golden_model().write(folder / "golden.gguf"), safety_margin_bytes=0).path


def test_golden_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are byte for byte those that were committed when the format was fixed."""
    pack = golden_pack(tmp_path, monkeypatch)
    assert manifest_of(pack).read_text() == (GOLDEN / "golden.expert-pack.manifest.json").read_text()
    data = pack.read_bytes()
    assert data[:128] == bytes.fromhex((GOLDEN / "golden.expert-pack.header.hex").read_text())
    assert data[4096:4176] == bytes.fromhex((GOLDEN / "golden.expert-pack.index.hex").read_text())
    assert hashlib.sha256(data).hexdigest() == ("172ca546336e30ed1eb1daf0044a4f075a438c06a619cce5a097b135d0d473c2")


def test_golden_pack_follows_the_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built again from docs/FORMAT.md alone."""
    pack = golden_pack(tmp_path, monkeypatch)
    blocks = []
    for expert in range(2):
        up = COUNTING[512 * expert : 512 * expert + 512]
        down = COUNTING[7 + 512 * expert : 7 + 512 * expert + 512]
        # up: 512 bytes and 448 for missing values, to 1024; down: 512 and 504
        blocks.append((up.ljust(1024, b"\0") + down).ljust(4096, b"\0"))
    index = b"".join(
        ENTRY.pack(0, 0, 8192 + 4096 * expert, 4096, xxhash.xxh3_128(block).digest())
        for expert, block in enumerate(blocks)
    )
    found = json.loads(manifest_of(pack).read_text())
    header = HEADER.pack(
        b"LXPTPACK", 1, 4096, 4096, 1, 2, 4096, 80, 8192, 16384,
        hashlib.sha256(index).digest(), hashlib.sha256(canonical(found)).digest(),
    ).ljust(4096, b"\0")  # fmt: skip
    assert pack.read_bytes() == header + index.ljust(4096, b"\0") + blocks[0] + blocks[1]
    assert found["header_sha256"] == hashlib.sha256(header).hexdigest()


def test_places_and_digests(tmp_path: Path) -> None:
    """Every expert's block holds its weights where the roles say, zeros elsewhere; its digest fits."""
    tensors = [*moe_tensors(0, n_expert=4), *moe_tensors(2, n_expert=3, n_ff=96, types=(8, 1, 2))]
    model = GGUF(facts(), tensors)
    pack = open_pack(convert(model.write(tmp_path / "model.gguf"), safety_margin_bytes=0).path)
    written = {tensor.name: tensor.bytes() for tensor in tensors}
    assert pack.n_keys == 7
    for layer in pack.layers:
        for expert in range(layer.n_expert):
            offset = pack.offset(layer.index, expert)
            assert offset == layer.data_offset + expert * layer.block_bytes
            data = np.fromfile(pack.path, np.uint8, layer.block_bytes, offset=offset)
            assert pack.digest(layer.index, expert) == xxhash.xxh3_128(data.tobytes()).digest()
            for role in layer.roles:
                weight = written[role.tensor][expert * role.bytes : (expert + 1) * role.bytes]
                assert data[role.offset : role.offset + role.bytes].tobytes() == weight
                data[role.offset : role.offset + role.bytes] = 0
            assert not data.any()
    assert pack.payload_bytes == pack.path.stat().st_size - pack.layers[0].data_offset


def test_no_such_expert(tmp_path: Path) -> None:
    pack = open_pack(convert(tiny_moe().write(tmp_path / "model.gguf"), safety_margin_bytes=0).path)
    for layer, expert in ((0, 4), (0, -1), (2, 0), (-1, 0)):
        with pytest.raises(IndexError):
            pack.offset(layer, expert)


def test_find_pack(tmp_path: Path) -> None:
    paths = split(tiny_moe(), [4, 5], tmp_path)
    with pytest.raises(PackError, match=r"no pack beside the model: .*model.expert-pack does not exist"):
        find_pack(paths[0])
    made = convert(paths[0], safety_margin_bytes=0).path
    assert find_pack(paths[0]) == made == tmp_path / "model.expert-pack"


def test_renamed_pack_and_model(tmp_path: Path) -> None:
    model = tiny_moe().write(tmp_path / "model.gguf")
    path = convert(model, safety_margin_bytes=0).path
    other = tmp_path / "other.expert-pack"
    manifest_of(path).rename(manifest_of(other))
    path.rename(other)
    check_source(open_pack(other), model.rename(tmp_path / "other.gguf"))


def changed_trunk(model: GGUF) -> None:
    model.tensors[0].seed = 5


def changed_metadata(model: GGUF) -> None:
    model.kv = [*model.kv[:-1], facts(top_k=3)[-1]]


def one_block_more(model: GGUF) -> None:
    model.tensors = [*model.tensors, *moe_tensors(2)]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (changed_trunk, "weights outside the experts differ"),
        (changed_metadata, "metadata or tensor table of model.gguf differs"),
        (one_block_more, r"made from model.gguf of \d+ bytes"),
    ],
)
def test_other_model(change: object, sentence: str, tmp_path: Path) -> None:
    model = tiny_moe()
    path = model.write(tmp_path / "model.gguf")
    pack = open_pack(convert(path, safety_margin_bytes=0).path)
    check_source(pack, path)
    assert callable(change)
    change(model)
    model.write(path)
    with pytest.raises(SourceMismatchError, match=sentence):
        check_source(pack, path)


def test_other_number_of_shards(tmp_path: Path) -> None:
    model = tiny_moe()
    pack = open_pack(convert(model.write(tmp_path / "model.gguf"), safety_margin_bytes=0).path)
    paths = split(model, [4, 5], tmp_path)
    with pytest.raises(SourceMismatchError, match=r"made from 1 file\(s\), the model has 2"):
        check_source(pack, paths[0])


def test_version_is_that_of_the_distribution() -> None:
    assert manifest_module.BUILDER.split()[-1] == version("llama-expert-pack")
