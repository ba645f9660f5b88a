"""Logits of small models on the GPU: packed, at several budgets, against stock."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.logits import Run, differences, minimum_budget, run_jobs
from lab.stock import STOCK_LIB
from lab.variants import VARIANTS
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import GGUFError
from llama_expert_pack.pypack.format.pack import open_pack

BUDGETS = ("all", "half", "least")
# prefill of several sizes, small batches that take other kernels, single tokens
BATCHES = [64, 32, 1, 2, 4, 8, 16, 3, 7, *[1] * 16]
N_GREEDY = 300
# what people run: these also answer greedily, which takes longest
TYPES = ("MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "NVFP4", "F16", "BF16")
ARCHITECTURES = ("deepseek4", "kimi-k3", "gpt-oss", "qwen3moe", "glm4moe")
COMMON = frozenset({*(f"type-{name}" for name in TYPES), *(f"{name}-moe" for name in ARCHITECTURES)})
_N_PROCESSES = 6
_MODELS_PER_PROCESS = 6


@dataclass(frozen=True)
class Case:
    """One model at one budget."""

    name: str
    budget: str


def small_models(folder: Path, variants: Sequence[str], architectures: Sequence[str] | None) -> dict[str, Path]:
    """Writes models of lab/variants.py, and those of upstream's test-llama-archs, None: all; name -> GGUF."""
    folder.mkdir(parents=True, exist_ok=True)
    tool = STOCK_LIB / "test-llama-archs"
    for name in [""] if architectures is None else architectures:
        command = [str(tool), "-o", str(folder), "-s", "42", *(["-a", name] if name else [])]
        subprocess.run(command, check=True, capture_output=True)
    models = {path.stem: path for path in sorted(folder.glob("*-moe.gguf"))}
    for name in variants:
        (folder / name).mkdir(exist_ok=True)
        models[name] = VARIANTS[name](folder / name)
    return models


def compare(models: dict[str, Path], scratch: Path, **options: Any) -> Iterator[tuple[Case, Run, Run]]:
    """Runs every model with stock and with its pack at every budget; (case, stock, ours), in no order. Options: Llama's."""
    names = list(models)
    shares = [names[i : i + _MODELS_PER_PROCESS] for i in range(0, len(names), _MODELS_PER_PROCESS)]
    with ThreadPoolExecutor(_N_PROCESSES) as pool:
        runs = [
            pool.submit(_compare_share, {name: models[name] for name in share}, scratch, options) for share in shares
        ]
        for done in as_completed(runs):
            yield from done.result()


def _compare_share(models: dict[str, Path], scratch: Path, options: dict[str, Any]) -> list[tuple[Case, Run, Run]]:
    jobs = []
    cases = []
    for name, path in models.items():
        try:
            pack = open_pack(convert(path).path)
        except GGUFError:
            continue  # upstream calls some dense models "moe"; tests/conformance says which
        least = minimum_budget(pack)
        budgets = {"all": pack.payload_bytes, "half": max(least, pack.payload_bytes // 2), "least": least}
        common = {"model": str(path), "batches": BATCHES, "greedy": N_GREEDY if name in COMMON else 0}
        base = {"n_gpu_layers": -1, "n_ctx": 512, **options}
        jobs.append({"id": f"{name}.stock", "stock": True, "repack": True, "llama": base, **common})
        for budget, n_bytes in budgets.items():
            packed = {**base, "expert_pack": True, "expert_cache_reserve": 0, "expert_cache": n_bytes}
            jobs.append({"id": f"{name}.{budget}", "stock": False, "llama": packed, **common})
            cases.append(Case(name, budget))
    runs = run_jobs(jobs, scratch) if jobs else {}
    return [(case, runs[f"{case.name}.stock"], runs[f"{case.name}.{case.budget}"]) for case in cases]


def record_of(case: Case, stock: Run, ours: Run) -> dict[str, object]:
    """One line of results."""
    difference = differences(stock, ours)
    record: dict[str, object] = {"model": case.name, "budget": case.budget, "identical": difference == ""}
    record["difference"] = difference[:600]
    if stock.logits is not None and ours.logits is not None:
        record["finite"] = bool(np.isfinite(ours.logits).all()) == bool(np.isfinite(stock.logits).all())
        record["same_argmax"] = bool((stock.logits.argmax(axis=1) == ours.logits.argmax(axis=1)).all())
        record["same_greedy"] = stock.found.get("greedy") == ours.found.get("greedy")
        record["largest_difference"] = float(np.nanmax(np.abs(stock.logits.astype(np.float64) - ours.logits)))
        record["largest_logit"] = float(np.nanmax(np.abs(stock.logits)))
    record["expert_stats"] = ours.found.get("expert_stats")
    return record
