"""The GGUF reader agrees with other writers and readers, and finds all shards of a model."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from llama_expert_pack.pypack.ggml_types import GGML_TYPES
from llama_expert_pack.pypack.gguf import head as gguf_head
from llama_expert_pack.pypack.gguf.model import model_stem, read_model
from tests.gguf_bytes import GGUF, STRING, U32, T, array, facts, kv, moe_tensors, split, text, tiny_moe


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Öl")
    writer.add_uint64("big", (1 << 64) - 1)
    writer.add_float32("half", 0.5)
    writer.add_bool("yes", True)
    writer.add_array("few", [1, 2, 3])
    writer.add_array("words", ["a", "bb", ""])
    writer.add_custom_alignment(128)
    rng = np.random.default_rng(0)
    writer.add_tensor("a.weight", rng.random((3, 5, 7), np.float32))
    writer.add_tensor("b.weight", rng.random((2, 64), np.float32).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    model = read_model(path)
    assert (model.architecture, model.name) == ("llama", "Öl")
    assert model.metadata["big"] == (1 << 64) - 1
    assert model.metadata["half"] == 0.5
    assert model.metadata["yes"] is True
    assert model.metadata["few"] == (1, 2, 3)
    assert "words" not in model.metadata
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert model.tensors.keys() == reference.keys()
    for name, tensor in model.tensors.items():
        expected = reference[name]
        assert tensor.offset == expected.data_offset
        assert tensor.size_bytes == expected.n_bytes
        assert tensor.ne == tuple(expected.shape)
        assert tensor.type_name == expected.tensor_type.name


def test_knows_every_type_of_the_gguf_package() -> None:
    for quantization, (values, size) in gguf.GGML_QUANT_SIZES.items():
        if quantization.name == "Q8_1":  # gguf has the size of an older block; ggml's is two halves and 32 bytes
            size = 2 * 2 + 32
        assert GGML_TYPES[int(quantization)] == (quantization.name, values, size)


@pytest.mark.parametrize("version", [2, 3])
def test_versions(version: int, tmp_path: Path) -> None:
    model = tiny_moe()
    model.version = version
    assert len(read_model(model.write(tmp_path / "model.gguf")).tensors) == 9


@pytest.mark.parametrize("window_bytes", [64, 100, 1000, 4 << 20])
def test_window_does_not_matter(window_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of any size are read right wherever the reader's window happens to end."""
    words = ["x" * (i * 37 % 300) for i in range(200)]
    model = GGUF(
        [array("words", STRING, words), *facts(), text("long", "y" * 700), array("n", U32, range(2000))],
        moe_tensors(0),
    )
    path = model.write(tmp_path / "model.gguf")
    monkeypatch.setattr(gguf_head, "_WINDOW_BYTES", window_bytes)
    found = read_model(path)
    assert found.metadata["long"] == "y" * 700
    assert found.metadata["test.block_count"] == 2
    assert found.shards[0].head_sha256 == hashlib.sha256(model.head()).hexdigest()
    data = path.read_bytes()
    for tensor, written in zip(found.tensors.values(), model.tensors, strict=True):
        assert data[tensor.offset : tensor.offset + tensor.size_bytes] == written.bytes()


def test_large_vocabulary_is_passed_over_without_reading_ahead(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(160_000)]
    model = GGUF([array("tokenizer.ggml.tokens", STRING, tokens), *facts()], moe_tensors(0))
    found = read_model(model.write(tmp_path / "model.gguf"))
    assert found.metadata["test.expert_used_count"] == 2
    assert "tokenizer.ggml.tokens" not in found.metadata


def test_custom_alignment(tmp_path: Path) -> None:
    model = GGUF([*facts(), kv("general.alignment", U32, 4096)], moe_tensors(0), alignment=4096)
    found = read_model(model.write(tmp_path / "model.gguf"))
    assert {tensor.offset % 4096 for tensor in found.tensors.values()} == {0}


def test_unpadded_end_is_accepted(tmp_path: Path) -> None:
    """Some writers do not pad the last tensor."""
    path = tmp_path / "model.gguf"
    data = GGUF(facts(), [*moe_tensors(0), T("z", (1,))]).build()
    path.write_bytes(data[:-28])
    assert read_model(path).tensors["z"].size_bytes == 4


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = tiny_moe()
    paths = split(model, [0, 4, 5], tmp_path)
    found = read_model(paths[0])
    assert [shard.name for shard in found.shards] == [path.name for path in paths]
    assert [shard.size_bytes for shard in found.shards] == [path.stat().st_size for path in paths]
    for written in model.tensors:
        tensor = found.tensors[str(written.name)]
        data = paths[tensor.file_id].read_bytes()
        assert data[tensor.offset : tensor.offset + tensor.size_bytes] == written.bytes()


def test_links_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a download cache: names that link to files with other names in another folder."""
    blobs, names = tmp_path / "blobs", tmp_path / "names"
    blobs.mkdir()
    names.mkdir()
    for i, path in enumerate(split(tiny_moe(), [4, 5], blobs)):
        blob = path.rename(blobs / f"{i:064x}")
        (names / path.name).symlink_to(os.path.relpath(blob, names))
    monkeypatch.chdir(names)
    assert len(read_model("model-00001-of-00002.gguf").tensors) == 9
    assert len(read_model("../names/model-00001-of-00002.gguf").tensors) == 9


def test_split_count_of_one_is_a_single_file(tmp_path: Path) -> None:
    (path,) = split(tiny_moe(), [9], tmp_path)
    assert len(read_model(path.rename(tmp_path / "any.gguf")).tensors) == 9


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("a/model.gguf", "model"),
        ("model-00001-of-00038.gguf", "model"),
        ("model-Q4_K.v2.gguf", "model-Q4_K.v2"),
        ("model-1-of-2.gguf", "model-1-of-2"),
        ("model.bin", "model.bin"),
    ],
)
def test_model_stem(name: str, stem: str) -> None:
    assert model_stem(name) == stem
