"""Batches of all lengths at which a path through the code changes, packed beside stock, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.logits import Run, minimum_budget, run_jobs
from lab.variants import VARIANTS
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.format.pack import open_pack

# single tokens and vectors up to 8 columns; captured graphs with up to 1024 ids; prompts of one physical batch
LENGTHS = [1, 2, 8, 9, 64, 170, 171, 512, 1024, 2048, 4096]
NAMES = ("type-Q4_K", "type-MXFP4", "many-experts")


def runs_of_all_lengths(folder: Path, shares: dict[str, tuple[float, float]], **llama: Any) -> dict[str, Run]:
    """By "model.budget", and "model.stock". ``shares``: by the budget's name, of the experts: in the cache (0: the least that can be),
    in host memory beside a GPU's. ``llama``: more keywords."""
    jobs: list[dict[str, Any]] = []
    for name in NAMES:
        place = folder / name
        place.mkdir()
        path = VARIANTS[name](place)
        pack = open_pack(convert(path).path)
        base = {"n_ctx": 8192, "n_batch": max(LENGTHS), "n_ubatch": max(LENGTHS), **llama}
        common = {"model": str(path), "batches": LENGTHS}
        jobs.append({"id": f"{name}.stock", "stock": True, "llama": base, **common})
        for budget, (cache, ram) in shares.items():
            packed = {"expert_pack": True, "expert_cache_reserve": 0, "expert_ram": int(pack.payload_bytes * ram)}
            packed["expert_cache"] = max(minimum_budget(pack), int(pack.payload_bytes * cache))
            jobs.append({"id": f"{name}.{budget}", "stock": False, "llama": {**base, **packed}, **common})
    return run_jobs(jobs, folder / "logits")
