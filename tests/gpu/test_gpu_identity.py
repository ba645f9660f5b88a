"""Logits with all layers on the GPU: those of stock on the same GPU, bit by bit."""

from __future__ import annotations

import pytest

from bench.gpu_identity import BUDGETS, Case, compare, small_models
from tests.compare import Run, differences
from tests.models import VARIANTS

TYPES = ["MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "NVFP4", "F16", "BF16"]
NAMES = [f"type-{name}" for name in TYPES] + [
    "two-groups", "gate-up", "no-gate", "mixed-in-layer", "mixed-between-layers", "expert-biases", "many-experts",
]  # fmt: skip
ARCHITECTURES = ["deepseek4", "kimi-k3", "gpt-oss", "qwen3moe", "glm4moe"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Case, Run, Run]]:
    folder = tmp_path_factory.mktemp("gpu")
    models = small_models(folder, [name for name in NAMES if name in VARIANTS], ARCHITECTURES)
    return {(case.name, case.budget): (case, stock, ours) for case, stock, ours in compare(models, folder / "logits")}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", [*NAMES, *(f"{name}-moe" for name in ARCHITECTURES)])
def test_logits_and_greedy_tokens_are_identical(
    name: str, budget: str, cases: dict[tuple[str, str], tuple[Case, Run, Run]]
) -> None:
    _, stock, ours = cases[name, budget]
    assert differences(stock, ours) == ""
    assert ours.stats["loads"] > 0, "no expert came from the pack"
    assert ours.found["greedy"] == stock.found["greedy"]
