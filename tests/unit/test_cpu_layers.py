"""Which layers compute their experts on the CPU."""

from __future__ import annotations

import pytest

from llama_expert_pack.bridge.cpu_layers import first_blocks_on_cpu, layers_on_cpu
from llama_expert_pack.pypack.errors import UsageError
from llama_expert_pack.pypack.format.layout import Layer, Role


def layer(index: int, block: int) -> Layer:
    roles = tuple(
        Role(name, f"blk.{block}.ffn_{name}_exps.weight", 0, "F32", (8, 8, 2), 256, i * 256)
        for i, name in enumerate(("gate", "up", "down"))
    )
    return Layer(index, block, "exps", 2, index * 2, 4096, roles)


LAYERS = [layer(0, 1), layer(1, 2), layer(2, 11)]  # block 0 is dense
# what llama.cpp makes of --cpu-moe and --n-cpu-moe
ALL = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"


def of_block(block: int) -> str:
    return rf"blk\.{block}{ALL}"


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([], set()),
        ([(ALL, "CPU")], {0, 1, 2}),
        ([(of_block(0), "CPU"), (of_block(1), "CPU")], {0}),
        ([("exps", "CUDA_Host")], {0, 1, 2}),
        ([("attn", "CUDA1"), (r"blk\.2\.", "CPU")], {1}),
        ([(r"blk\.[[:digit:]]+\.ffn_.*_exps", "CPU")], {0, 1, 2}),
        ([(r"blk\.1[^[:digit:]].*exps", "CPU")], {0}),
        ([("exps", "CPU"), ("exps", "CUDA0")], {0, 1, 2}),
    ],
    ids=repr,
)
def test_layers_on_cpu(overrides: list[tuple[str, str]], found: set[int]) -> None:
    assert layers_on_cpu(LAYERS, overrides) == found


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([("ffn_up_exps", "CPU")], "places some of the expert weights of layer 1 on the CPU and leaves others"),
        ([("exps", "CUDA0")], "'exps' places experts of layer 1 in CUDA0, but with an expert pack only CPU"),
        ([(r"\.11\..*down", "CPU_REPACK")], r"places experts of layer 11 in CPU_REPACK"),
        ([("((exps", "CPU")], r"'\(\(exps' can't be understood, and may place experts"),
        ([("[[.a.]]", "CPU")], r"can't be understood, and may place experts"),
    ],
    ids=repr,
)
def test_what_is_refused(overrides: list[tuple[str, str]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        layers_on_cpu(LAYERS, overrides)


def test_the_first_blocks() -> None:
    assert [first_blocks_on_cpu(LAYERS, n) for n in (0, 1, 2, 3, 99)] == [set(), set(), {0}, {0, 1}, {0, 1, 2}]
