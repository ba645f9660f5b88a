"""Logits with all layers on the GPU: those of stock on the same GPU, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.identity import ARCHITECTURES, BATCHES, BUDGETS, TYPES, Case, compare, small_models
from lab.logits import Run, differences, minimum_budget, run_jobs
from lab.variants import VARIANTS
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.format.pack import open_pack

NAMES = [f"type-{name}" for name in TYPES] + [
    "gate-up", "no-gate", "mixed-in-layer", "mixed-between-layers", "expert-biases", "many-experts",
]  # fmt: skip


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
    assert ours.stats["host_hits"] == 0 or "+" in budget
    assert ours.found["greedy"] == stock.found["greedy"]


def test_host_memory_was_used(cases: dict[tuple[str, str], tuple[Case, Run, Run]]) -> None:
    """Not by each: some models fit, others have too few experts for a tier."""
    used = [case.budget for case, _, ours in cases.values() if ours.stats["host_hits"] > 0]
    assert len(used) > len(cases) // 6 and {budget for budget in BUDGETS if "+" in budget} == set(used)


@pytest.mark.parametrize("share", [1.0, 0.25], ids=["all fit", "some are read again and again"])
def test_experts_that_change_places(share: float, tmp_path: Path) -> None:
    """A greedy text repeats itself: what it uses goes up to the GPU, and all stays right meanwhile."""
    path = VARIANTS["many-experts"](tmp_path)
    pack = open_pack(convert(path).path)
    whole = pack.payload_bytes
    common = {"model": str(path), "batches": [64, *[1] * 100], "greedy": 300}
    llama = {"n_gpu_layers": -1, "n_ctx": 512}
    packed = {**llama, "expert_pack": True, "expert_cache_reserve": 0, "expert_cache": whole // 5}
    packed["expert_ram"] = int(whole * share)
    jobs = [
        {"id": "stock", "stock": True, "repack": True, "llama": llama, **common},
        {"id": "packed", "stock": False, "llama": packed, **common},
    ]
    runs = run_jobs(jobs, tmp_path / "logits")
    assert differences(runs["stock"], runs["packed"]) == ""
    assert runs["packed"].found["greedy"] == runs["stock"].found["greedy"]
    stats = runs["packed"].stats
    assert stats["host_hits"] > 0 and stats["moves_up"] > 0 and stats["moves_down"] > 0
    on_the_way = (
        stats["h2d_bytes"] - whole // 5
    )  # what was read into host memory and copied for a waiting kernel, at least
    assert on_the_way > 10 * pack.layers[0].block_bytes if share < 1 else on_the_way <= 0


def test_a_token_that_names_an_expert_twice(tmp_path: Path) -> None:
    """In small batches as stock; in larger ones stock's kernels count one of the two and compute with what lay in memory."""
    path = VARIANTS["two-groups"](tmp_path)
    pack = open_pack(convert(path).path)
    budgets = {"all": pack.payload_bytes, "least": minimum_budget(pack)}
    jobs: list[dict[str, Any]] = []
    for name, batches in (("small", [1, 2, 4, 1, 2, 4, *[1] * 20]), ("mixed", BATCHES)):
        common = {"model": str(path), "batches": batches, "greedy": 0}
        llama = {"n_gpu_layers": -1, "n_ctx": 512}
        jobs.append({"id": f"{name}.stock", "stock": True, "repack": True, "llama": llama, **common})
        for budget, n_bytes in budgets.items():
            packed = {**llama, "expert_pack": True, "expert_cache_reserve": 0, "expert_cache": n_bytes}
            jobs.append({"id": f"{name}.{budget}", "stock": False, "llama": packed, **common})
    runs = run_jobs(jobs, tmp_path / "logits")
    for budget in budgets:
        assert differences(runs["small.stock"], runs[f"small.{budget}"]) == "", budget
    assert differences(runs["mixed.all"], runs["mixed.least"]) == ""
    logits = runs["mixed.all"].logits
    assert logits is not None and np.isfinite(logits).all()
