"""Which tensors are routed experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_expert_pack.pypack.format.layout import Layer
from llama_expert_pack.pypack.gguf.model import read_model
from llama_expert_pack.pypack.source.discover import ROUTED_NAME, find_layers
from llama_expert_pack.pypack.source.fingerprint import model_facts
from tests.gguf_bytes import BOOL, GGUF, T, array, facts, kv, moe_tensors, text


def layers_of(folder: Path, *tensors: T) -> list[Layer]:
    return find_layers(read_model(GGUF(facts(), tensors).write(folder / "model.gguf")))


def roles_of(layer: Layer) -> list[str]:
    return [role.name for role in layer.roles]


def test_only_routed_weights(tmp_path: Path) -> None:
    resident = [
        T("token_embd.weight", (64, 8)),
        T("blk.0.ffn_gate_inp.weight", (64, 4)),
        T("blk.0.ffn_gate_exps.bias", (32, 4)),
        T("blk.0.ffn_up_exps.scale", (4,)),
        T("blk.0.ffn_up_exps.input_scale", (4,)),
        T("blk.0.ffn_up_shexp.weight", (64, 32)),
        T("blk.0.ffn_norm_exps.weight", (64,)),
        T("blk.0.ffn_up_exps.weight.lora_a", (64, 2, 4)),
        T("xblk.0.ffn_up_exps.weight", (64, 32, 4)),
        T("blk.00.ffn_up_exps.weight", (64, 32, 4)),
        T("blk.1.ffn_up.weight", (64, 32)),
    ]
    (layer,) = layers_of(tmp_path, *resident, *moe_tensors(2))
    assert (layer.block, layer.group, layer.n_expert) == (2, "exps", 4)
    assert [role.tensor for role in layer.roles] == [
        "blk.2.ffn_gate_exps.weight",
        "blk.2.ffn_up_exps.weight",
        "blk.2.ffn_down_exps.weight",
    ]


def test_merged_missing_and_second_group(tmp_path: Path) -> None:
    layers = layers_of(
        tmp_path,
        T("blk.10.ffn_down_exps.weight", (32, 64, 4)),
        T("blk.10.ffn_gate_up_exps.weight", (64, 64, 4)),
        T("blk.9.ffn_up_exps.weight", (64, 32, 4)),
        T("blk.9.ffn_down_exps.weight", (32, 64, 4)),
        T("blk.9.ffn_up_chexps.weight", (64, 16, 2)),
    )
    assert [(layer.block, layer.group, layer.n_expert, layer.first_key) for layer in layers] == [
        (9, "exps", 4, 0), (9, "chexps", 2, 4), (10, "exps", 4, 6),
    ]  # fmt: skip
    assert [roles_of(layer) for layer in layers] == [["up", "down"], ["up"], ["gate_up", "down"]]


def test_types_may_differ(tmp_path: Path) -> None:
    layers = layers_of(tmp_path, *moe_tensors(0, n_ff=64, types=(2, 8, 30)), *moe_tensors(1))
    assert [role.type_name for role in layers[0].roles] == ["Q4_0", "Q8_0", "BF16"]
    assert [role.bytes for role in layers[0].roles] == [64 * 36, 64 * 68, 64 * 128]
    assert layers[0].block_bytes != layers[1].block_bytes


def test_a_single_expert_is_not_routed(tmp_path: Path) -> None:
    """Writers drop a last dimension of 1, so such a layer has two-dimensional weights."""
    layers = layers_of(tmp_path, T("blk.0.ffn_up_exps.weight", (64, 32)), *moe_tensors(1))
    assert [layer.block for layer in layers] == [1]


def test_fourth_dimension_of_one_says_nothing(tmp_path: Path) -> None:
    names = [f"blk.0.ffn_{role}_exps.weight" for role in ("up", "down")]
    (layer,) = layers_of(tmp_path, T(names[0], (64, 32, 4, 1)), T(names[1], (32, 64, 4, 1)), *moe_tensors(1))[:1]
    assert [role.ne for role in layer.roles] == [(64, 32, 4), (32, 64, 4)]


@pytest.mark.parametrize(
    "name", ["blk.1.ffn_gate_exps.weight\n", "blk.1\u0661.ffn_gate_exps.weight", "blk.1.ffn_\u0131"]
)
def test_names_that_only_look_like_experts(name: str, tmp_path: Path) -> None:
    """A newline at the end, digits of other scripts: no reader of packs would take such a tensor."""
    layers = layers_of(tmp_path, *moe_tensors(0), T(name, (64, 32, 4)))
    assert [layer.block for layer in layers] == [0]
    assert ROUTED_NAME.fullmatch(name) is None


def test_bools_are_not_numbers(tmp_path: Path) -> None:
    names = ("block_count", "expert_count", "expert_used_count")
    model = GGUF([*facts()[:2], *(kv(f"test.{name}", BOOL, 1) for name in names)], moe_tensors(0))
    found = model_facts(read_model(model.write(tmp_path / "model.gguf")))
    assert [type(getattr(found, name)) for name in names] == [int, int, int]
    assert (found.block_count, found.expert_count, found.expert_used_count) == (0, 0, 0)


def test_a_name_of_any_length_is_cut(tmp_path: Path) -> None:
    kvs = [facts()[0], text("general.name", "x" * (1 << 20)), *facts()[2:]]
    found = model_facts(read_model(GGUF(kvs, moe_tensors(0)).write(tmp_path / "model.gguf")))
    assert found.name == "x" * 1000


def test_top_k_may_be_an_array(tmp_path: Path) -> None:
    kv = [entry for entry in facts() if b"expert_used_count" not in entry]
    model = GGUF([*kv, array("test.expert_used_count", 4, [0, 6, 2])], moe_tensors(0))
    found = model_facts(read_model(model.write(tmp_path / "model.gguf")))
    assert (found.expert_used_count, found.expert_count, found.block_count) == (6, 4, 2)


@pytest.mark.parametrize("entry", [array("test.expert_used_count", 8, ["6"])])
def test_facts_of_a_wrong_type_are_not_facts(entry: bytes, tmp_path: Path) -> None:
    kv = [e for e in facts() if b"expert_used_count" not in e]
    model = GGUF([*kv, entry], moe_tensors(0))
    assert model_facts(read_model(model.write(tmp_path / "model.gguf"))).expert_used_count == 0
