"""Synthetic models over weight types and layer shapes: pack logits are stock's, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest

from lab.logits import BATCHES, Run, differences, minimum_budget, run_jobs
from lab.variants import VARIANTS
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.format.pack import open_pack

PACKED = {"expert_pack": True, "expert_cache_reserve": 0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("variants")
    jobs = []
    for name, write in VARIANTS.items():
        place = folder / name
        place.mkdir()
        path = write(place)
        pack = open_pack(convert(path).path)
        common = {"model": str(path), "batches": BATCHES}
        jobs += [
            {"id": f"{name}.stock", "stock": True, "llama": {}, **common},
            {"id": f"{name}.all", "stock": False, "llama": {**PACKED, "expert_cache": pack.payload_bytes}, **common},
            {
                "id": f"{name}.least",
                "stock": False,
                "llama": {**PACKED, "expert_cache": minimum_budget(pack)},
                **common,
            },
        ]
    return run_jobs(jobs, folder / "logits")


@pytest.mark.parametrize("budget", ["all", "least"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_identical(name: str, budget: str, runs: dict[str, Run]) -> None:
    ours = runs[f"{name}.{budget}"]
    assert differences(runs[f"{name}.stock"], ours) == ""
    assert ours.stats["loads"] > 0, "no expert came from the pack"


# ---- one model, other ways to run it

THREADS = [1, 2, 3, 7, 64]
SETTINGS: dict[str, dict[str, Any]] = {
    "few-threads-few-slots": {"n_threads": 3, "n_threads_batch": 5},
    "small-ubatch": {"n_ubatch": 5},
    "top-1": {"kv_overrides": {"qwen3moe.expert_used_count": 1}},
    "top-5": {"kv_overrides": {"qwen3moe.expert_used_count": 5}},
    "no-mmap": {"use_mmap": False},
    "flash-attention": {"flash_attn": True},
    "every-read-checked": {"expert_verify": "every"},
    "unchecked": {"expert_verify": "off"},
    "one-read-at-a-time": {"expert_stage_slots": 1, "expert_read_splits": 1},
    "buffered": {"expert_direct_io": False},
    "lru": {"expert_policy": "lru"},
    "freq-recency": {"expert_policy": "freq-recency"},
    **{f"threads-{n}": {"n_threads": n, "n_threads_batch": n} for n in THREADS},
}


@pytest.fixture(scope="module")
def setting_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("settings")
    path = VARIANTS["type-Q4_K"](folder)
    pack = open_pack(convert(path).path)
    jobs = []
    for name, options in SETTINGS.items():
        stock = {key: value for key, value in options.items() if not key.startswith("expert_")}
        top_k = max(stock.get("kv_overrides", {"": 0}).values()) or None
        budget = minimum_budget(pack, top_k)
        common = {"model": str(path), "batches": BATCHES[:8]}
        jobs += [
            {"id": f"{name}.stock", "stock": True, "llama": stock, **common},
            {"id": f"{name}.ours", "stock": False, "llama": {**PACKED, "expert_cache": budget, **options}, **common},
            {"id": f"{name}.no-pack", "stock": False, "llama": stock, **common},
            {"id": f"{name}.repacked", "stock": True, "repack": True, "llama": stock, **common},
        ]
    return run_jobs(jobs, folder / "logits")


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_do_not_change_logits(name: str, setting_runs: dict[str, Run]) -> None:
    assert differences(setting_runs[f"{name}.stock"], setting_runs[f"{name}.ours"]) == ""


@pytest.mark.parametrize("name", SETTINGS)
def test_without_a_pack_it_is_stock(name: str, setting_runs: dict[str, Run]) -> None:
    assert differences(setting_runs[f"{name}.repacked"], setting_runs[f"{name}.no-pack"]) == ""
