"""Places of roles in a block and of blocks in a pack."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_expert_pack.pypack.format.layout import Weight, lay_out_block, lay_out_pack
from llama_expert_pack.pypack.ggml_types import GGML_TYPES, row_bytes

BY_NAME = {traits.name: number for number, traits in GGML_TYPES.items()}


def weights(n_embd: int, n_ff: int, gate: str, up: str, down: str, n_expert: int = 8) -> list[Weight]:
    return [
        Weight("down", "down", BY_NAME[down], (n_ff, n_embd, n_expert)),
        Weight("gate", "gate", BY_NAME[gate], (n_embd, n_ff, n_expert)),
        Weight("up", "up", BY_NAME[up], (n_embd, n_ff, n_expert)),
    ]


@pytest.mark.parametrize(
    ("shape", "types", "block_bytes"),
    [
        ((4096, 2048), ("MXFP4", "MXFP4", "MXFP4"), 13_369_344),  # DeepSeek-V4-Flash, as published
        ((3584, 3072), ("Q2_K", "Q2_K", "Q3_K"), 11_956_224),  # Kimi-K3, as published
        # rows of 64 and 32 values: zeros for 448 and 480 more behind each role
        ((64, 32), ("F32", "F32", "F32"), 32768),
    ],
)
def test_known_blocks(shape: tuple[int, int], types: tuple[str, str, str], block_bytes: int) -> None:
    roles, found = lay_out_block(weights(*shape, *types))
    assert found == block_bytes
    assert [role.name for role in roles] == ["gate", "up", "down"]


def test_padding_by_hand() -> None:
    roles, block_bytes = lay_out_block(weights(64, 32, "F32", "F32", "F32"))
    # 64*32*4 = 8192 bytes and 448*4 = 1792 more; 32*64*4 = 8192 and 480*4 = 1920 more
    assert [(role.offset, role.bytes) for role in roles] == [(0, 8192), (9984, 8192), (19968, 8192)]
    assert 19968 + 8192 + 1920 <= block_bytes == 32768


@st.composite
def any_block(draw: st.DrawFn) -> list[Weight]:
    names = draw(st.sets(st.sampled_from(["gate_up", "gate", "up", "down"]), min_size=1))
    result = []
    for name in draw(st.permutations(sorted(names))):
        number = draw(st.sampled_from(sorted(GGML_TYPES)))
        columns = draw(st.integers(1, 20)) * GGML_TYPES[number].block_values
        result.append(Weight(name, name, number, (columns, draw(st.integers(1, 50)), 3)))
    return result


@given(any_block())
def test_any_block(block: list[Weight]) -> None:
    """Roles in order, at multiples of 256, each followed by enough zeros; the block a multiple of 4096."""
    roles, block_bytes = lay_out_block(block)
    assert [role.name for role in roles] == [
        n for n in ("gate_up", "gate", "up", "down") if n in {w.role for w in block}
    ]
    ends = [role.offset for role in roles[1:]] + [block_bytes]
    for role, end in zip(roles, ends, strict=True):
        assert role.offset % 256 == 0
        missing = -role.ne[0] % 512
        padding = row_bytes(role.type, missing) if missing else 0
        assert role.offset + role.bytes + padding <= end
    assert block_bytes % 4096 == 0
    assert ends[-1] - roles[-1].offset - roles[-1].bytes < 4096 + 256 + row_bytes(roles[-1].type, 512)


def test_uniform_model_obeys_the_formula() -> None:
    blocks = [(block, "exps", weights(64, 32, "F32", "F16", "Q8_0", n_expert=6)) for block in (3, 1, 7)]
    layers = lay_out_pack(blocks, 4096, 40)
    data_start, stride = 8192, layers[0].block_bytes
    assert [layer.block for layer in layers] == [1, 3, 7]
    for layer in layers:
        for expert in range(6):
            offset = layer.data_offset + expert * layer.block_bytes
            assert offset == data_start + (layer.index * 6 + expert) * stride


def test_mixed_layers_follow_each_other() -> None:
    blocks = [
        (0, "chexps", weights(64, 32, "F16", "F16", "F16", n_expert=4)),
        (1, "exps", weights(128, 32, "F32", "F32", "F32", n_expert=600)),
        (0, "exps", weights(64, 64, "F32", "F32", "F32", n_expert=8)),
    ]
    layers = lay_out_pack(blocks, 4096, 40)
    assert [(la.block, la.group, la.first_key) for la in layers] == [
        (0, "exps", 0), (0, "chexps", 8), (1, "exps", 12),
    ]  # fmt: skip
    offset = 4096 + 6 * 4096  # 612 entries of 40 bytes take 6 pages
    assert layers[0].data_offset == 4096 * -(-(4096 + 612 * 40) // 4096) == offset
    for layer in layers:
        assert layer.data_offset == offset
        offset += layer.n_expert * layer.block_bytes
