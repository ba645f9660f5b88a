"""What a pack says about a model before llama.cpp has loaded it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_expert_pack.bridge.model_pack import gpu_layers, working_set
from llama_expert_pack.pypack.errors import GGUFError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from tests.pack_tools import resign
from tests.runtime.packed import variant


@pytest.mark.parametrize(
    ("n_gpu_layers", "blocks"),
    [(-1, [0, 1]), (0, []), (1, []), (2, [1]), (3, [0, 1]), (99, [0, 1]), (2**31 - 1, [0, 1])],
)
def test_layers_on_gpus(n_gpu_layers: int, blocks: list[int], tmp_path: Path) -> None:
    """Two layers and the output."""
    pack = open_pack(find_pack(variant("type-Q4_K", tmp_path)))
    assert [layer.block for layer in gpu_layers(pack, n_gpu_layers)] == blocks


def test_a_model_that_uses_more_experts_than_it_has_is_refused(tmp_path: Path) -> None:
    path = find_pack(variant("type-Q4_K", tmp_path))

    def used(n: int) -> int:
        resign(path, manifest=lambda facts: facts["model"].update(expert_used_count=n))
        return working_set(open_pack(path))

    assert (used(0), used(5)) == (1, 5)
    for n in (6, 2**40, 2**63 - 1):
        with pytest.raises(GGUFError, match=f"a token of the model uses {n} of 5 experts"):
            used(n)
