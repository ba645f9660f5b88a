"""Every mixture-of-experts architecture that upstream can write: pack logits are stock's, bit by bit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lab.logits import BATCHES, Run, differences, minimum_budget, run_jobs
from lab.stock import STOCK_LIB
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import GGUFError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.gguf.model import read_model
from llama_expert_pack.pypack.source.discover import find_layers

# What upstream writes with routed experts. A new one must be added here, one that vanished removed.
ARCHITECTURES = [
    "afmoe-moe",
    "arctic-moe",
    "bailingmoe-moe",
    "bailingmoe2-moe",
    "bailingmoe3-moe",
    "cohere2moe-moe",
    "dbrx-moe",
    "deepseek-moe",
    "deepseek2-moe",
    "deepseek32-moe",
    "deepseek4-moe",
    "dots1-moe",
    "dots3note-moe",
    "ernie4_5-moe-moe",
    "exaone-moe-moe",
    "glm-dsa-moe",
    "glm4moe-moe",
    "glm5-next-moe",
    "gpt-oss-moe",
    "granite-moe",
    "granitemoe-moe",
    "grok-moe",
    "grovemoe-moe",
    "hunyuan-moe-moe",
    "hy_v3-moe",
    "hy_v4-moe",
    "kimi-k3-moe",
    "kimi-linear-moe",
    "laguna-moe",
    "lfm2moe-moe",
    "llada-moe-moe",
    "llama-moe",
    "llama4-moe",
    "maple-moe",
    "mellum-moe",
    "mimo2-moe",
    "minicpm-moe",
    "minimax-01-moe",
    "minimax-m2-moe",
    "minimax-m3-moe",
    "mistral3-moe",
    "mistral4-moe",
    "olmoe-moe",
    "phimoe-moe",
    "qwen2moe-moe",
    "qwen35moe-moe",
    "qwen3moe-moe",
    "qwen3next-moe",
    "qwen3vlmoe-moe",
    "qwen4exp-moe",
    "refact-moe",
    "rnd1-moe",
    "smallthinker-moe",
]


# Upstream loads these experts, but its graph computes a dense feed-forward network.
NOT_COMPUTED = {"refact-moe"}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Upstream's generated models that have routed experts, by name."""
    folder = tmp_path_factory.mktemp("architectures")
    tool = STOCK_LIB / "test-llama-archs"
    assert tool.exists(), f"{tool}: not built: run `make stock`"
    subprocess.run([tool, "-o", folder, "-s", "42"], check=True, capture_output=True)
    found = {}
    for path in sorted(folder.glob("*.gguf")):
        if has_routed_experts(path):
            found[path.stem] = path
        else:
            path.unlink()
    return found


def has_routed_experts(path: Path) -> bool:
    try:
        find_layers(read_model(path))
    except GGUFError:
        return False
    return True


@pytest.fixture(scope="session")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    jobs = []
    for name, path in models.items():
        pack = open_pack(convert(path).path)
        common = {"model": str(path), "batches": BATCHES}
        packed = {"expert_pack": True, "expert_cache_reserve": 0}
        jobs += [
            {"id": f"{name}.stock", "stock": True, "llama": {}, **common},
            {"id": f"{name}.all", "stock": False, "llama": {**packed, "expert_cache": pack.payload_bytes}, **common},
            {
                "id": f"{name}.least",
                "stock": False,
                "llama": {**packed, "expert_cache": minimum_budget(pack)},
                **common,
            },
        ]
    return run_jobs(jobs, tmp_path_factory.mktemp("logits"))


def test_the_list_is_complete(models: dict[str, Path]) -> None:
    assert sorted(models) == ARCHITECTURES


@pytest.mark.parametrize("budget", ["all", "least"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_identical(name: str, budget: str, runs: dict[str, Run]) -> None:
    ours = runs[f"{name}.{budget}"]
    assert differences(runs[f"{name}.stock"], ours) == ""
    assert (ours.stats["loads"] > 0) == (name not in NOT_COMPUTED), "did experts come from the pack?"
    if budget == "all":
        assert ours.stats["evictions"] == 0
