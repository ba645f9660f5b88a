"""The model generator: the same bytes for the same arguments, valid GGUFs, true sizes, sane weights."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType, GGUFReader, quants
from gguf.constants import GGML_QUANT_SIZES

from lab.make_model import main, make_model, resized
from lab.presets import PRESETS
from lab.synth.blocks import TYPES, WEIGHT_TYPES, generator, weights
from lab.synth.gguf_out import encode_kv, read_kv, tokenizer_size, write_gguf
from lab.synth.model import tensors, write_model
from lab.synth.pack_size import blocks, payload_bytes
from lab.variants import NARROW, REFUSED_TYPES, SHAPES, VARIANTS, write_refused
from llama_expert_pack.pypack.gguf.model import read_model
from llama_expert_pack.pypack.source.discover import find_layers

NOT_IN_GGUF = {"Q2_0"}  # newer than the gguf package


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("preset", "n_layers", "n_experts", "block_bytes", "gigabytes"),
    [("dsv4", 43, 256, 13_369_344, 147.17), ("k3", 92, 896, 11_956_224, 985.58)],
)
def test_pack_of_published_models(
    preset: str, n_layers: int, n_experts: int, block_bytes: int, gigabytes: float
) -> None:
    assert blocks(PRESETS[preset]) == [(n_experts, block_bytes)] * n_layers
    assert round(payload_bytes(PRESETS[preset]) / 1e9, 2) == gigabytes


@pytest.mark.parametrize("name", SHAPES)
def test_pack_size_agrees_with_pypack(name: str, tmp_path: Path) -> None:
    """Two derivations of the layout, from sizes and from the file, give the same blocks."""
    layers = find_layers(read_model(VARIANTS[name](tmp_path)))
    assert [(layer.n_expert, layer.block_bytes) for layer in layers] == blocks(SHAPES[name])


def test_demo_is_a_few_hundred_megabytes() -> None:
    shape = replace(PRESETS["demo"], n_vocab=32000)
    assert 300e6 < sum(tensor.n_bytes for tensor in tensors(shape)) < 500e6
    assert shape.n_layer >= 12 and shape.n_expert >= 32


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_deterministic(name: str, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        assert VARIANTS[name](folder).is_file()
    files = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert files[0] == files[1]
    for file in files[0]:
        assert sha256(folders[0] / file) == sha256(folders[1] / file)


@pytest.mark.parametrize("name", [name for name in SHAPES if name.removeprefix("type-") not in NOT_IN_GGUF])
def test_variant_reads_back(name: str, tmp_path: Path) -> None:
    """Every tensor has the bytes of its type and shape, they follow each other, and the file ends there."""
    path = VARIANTS[name](tmp_path)
    reader = GGUFReader(path)
    expected = {tensor.name: tensor for tensor in tensors(SHAPES[name])}
    assert [tensor.name for tensor in reader.tensors] == list(expected)
    end = reader.data_offset
    for tensor in reader.tensors:
        want = expected[tensor.name]
        assert (tuple(tensor.shape.tolist()), tensor.tensor_type.name) == (want.ne, want.type)
        assert tensor.n_bytes == want.n_bytes
        assert tensor.data_offset == end
        end += -(-tensor.n_bytes // 32) * 32
    assert path.stat().st_size == end


def test_seed_changes_data_and_nothing_else(tmp_path: Path) -> None:
    one, two = (write_model(tmp_path / f"{seed}.gguf", NARROW, seed=seed) for seed in (1, 2))
    readers = GGUFReader(one), GGUFReader(two)
    assert one.read_bytes()[: readers[0].data_offset] == two.read_bytes()[: readers[1].data_offset]
    for a, b in zip(readers[0].tensors, readers[1].tensors, strict=True):
        assert not np.array_equal(a.data, b.data), a.name


@pytest.mark.parametrize(("name", "n_shards"), [("split", 3), ("split-by-tensor", 24)])
def test_split_holds_the_same_tensors(name: str, n_shards: int, tmp_path: Path) -> None:
    whole = GGUFReader(write_model(tmp_path / "whole.gguf", NARROW))
    first = VARIANTS[name](tmp_path)
    assert first.name == f"{name}-00001-of-{n_shards:05d}.gguf"
    shards = [GGUFReader(path) for path in sorted(tmp_path.glob(f"{name}-*.gguf"))]
    assert [shard.fields["split.no"].contents() for shard in shards] == list(range(n_shards))
    assert {shard.fields["split.count"].contents() for shard in shards} == {n_shards}
    assert {shard.fields["split.tensors.count"].contents() for shard in shards} == {len(whole.tensors)}
    parts = [tensor for shard in shards for tensor in shard.tensors]
    for a, b in zip(whole.tensors, parts, strict=True):
        assert a.name == b.name and np.array_equal(a.data, b.data)
    assert "general.architecture" in shards[0].fields
    assert all("general.architecture" not in shard.fields for shard in shards[1:])


def test_types_match_gguf() -> None:
    """All types that gguf lists are either tried or known to be refused, with the right id and sizes."""
    assert {t.name for t in GGMLQuantizationType} | NOT_IN_GGUF == {*WEIGHT_TYPES, *REFUSED_TYPES} == {*TYPES}
    for name in TYPES.keys() - NOT_IN_GGUF - {"Q8_1"}:  # gguf has the size of an older Q8_1
        kind = GGMLQuantizationType[name]
        assert (TYPES[name].id, TYPES[name].n_elements, TYPES[name].n_bytes) == (
            kind,
            *GGML_QUANT_SIZES[kind],
        )


@pytest.mark.parametrize("name", REFUSED_TYPES)
def test_refused_type_is_what_the_file_says(name: str, tmp_path: Path) -> None:
    data = write_refused(tmp_path, name).read_bytes()
    entry = b"blk.0.ffn_up_exps.weight" + (3).to_bytes(4, "little")
    position = data.index(entry) + len(entry) + 3 * 8
    assert int.from_bytes(data[position : position + 4], "little") == TYPES[name].id


@pytest.mark.parametrize("name", sorted(WEIGHT_TYPES.keys() - {"Q1_0", "Q2_0"}))
@pytest.mark.parametrize("rms", [0.02, 1.0])
def test_weights_have_the_wanted_size(name: str, rms: float) -> None:
    """Root mean square within a factor of 2 (scales can be powers of two), mean near zero, all finite."""
    kind, n_bytes = GGMLQuantizationType[name], TYPES[name].n_bytes
    array = np.concatenate(list(weights(name, generator(1, "x"), 1 << 18, rms)))
    if TYPES[name].n_elements > 1:
        values = quants.dequantize(array.reshape(-1, n_bytes), kind)
    else:
        values = quants.dequantize(array.view(np.uint8).reshape(1, -1) if name == "BF16" else array, kind)
    values = values.astype(np.float64)
    assert np.isfinite(values).all()
    assert rms / 2 < np.sqrt(np.mean(values**2)) < rms * 2
    assert abs(values.mean()) < rms / 10


def test_hash_table_names_different_experts(tmp_path: Path) -> None:
    table = next(tensor for tensor in GGUFReader(VARIANTS["hash-routed"](tmp_path)).tensors if "tid2eid" in tensor.name)
    rows = np.asarray(table.data).reshape(-1, 2)
    assert ((rows >= 0) & (rows < 8)).all()
    assert (rows[:, 0] != rows[:, 1]).all()
    assert len(np.unique(rows)) == 8


def test_tokenizer_is_copied(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.gguf"
    kv = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", *(f"t{i}" for i in range(63))],
        "tokenizer.ggml.scores": [0.0] * 64,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }} ä",
    }
    write_gguf(vocab, kv, tensors(NARROW)[:1])
    copied = read_kv(vocab, "tokenizer.")
    assert copied == [encode_kv(key, value) for key, value in kv.items() if key.startswith("tokenizer.")]
    assert tokenizer_size(copied) == 64
    made = GGUFReader(make_model(tmp_path / "m.gguf", "demo", tokenizer=vocab, n_layer=1, n_expert=4, n_embd=256))
    for key, value in kv.items():
        if key.startswith("tokenizer."):
            assert made.fields[key].contents() == value
    assert made.fields["qwen3moe.vocab_size"].contents() == 64


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_can_be_cut(preset: str) -> None:
    """Fewer layers and experts leave the shape of an expert alone, dense layers in front included."""
    small = resized(PRESETS[preset], n_layer=4, n_expert=20, n_expert_used=2)
    n_moe_layers = 4 - len(small.dense_layers)
    assert n_moe_layers >= 1
    assert [n for n, _ in blocks(small)] == [20] * n_moe_layers
    assert {size for _, size in blocks(small)} <= {size for _, size in blocks(PRESETS[preset])}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-k", "33"], "top-k"),
        (["--preset", "k3", "--layers", "3", "--experts", "16"], "--layers must be 4 at least"),
        (["--n-embd", "1000"], "rows of 1000"),
        (["--latent", "256"], "latent"),
        (["--shards", "9999"], "9999 shards"),
        (["--layers", "512", "--experts", "512", "--n-ff-exp", "1048576"], "free"),
        (["--tokenizer", "{html}"], "expected a GGUF"),
    ],
)
def test_wrong_arguments_get_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<!doctype html>" + " " * 64)
    arguments = [argument.format(html=tmp_path / "page.gguf") for argument in arguments]
    result = CliRunner().invoke(main, [str(tmp_path / "out.gguf"), *arguments])
    assert result.exit_code == 1
    errors = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and message in errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.gguf"]


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path / "k3.gguf"), "--preset", "k3", "--dry-run"])
    assert result.exit_code == 0 and "985.58 GB" in result.output
    assert not list(tmp_path.iterdir())
