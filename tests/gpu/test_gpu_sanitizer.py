"""compute-sanitizer finds no bad memory access: a prompt in passes and at once, decode steps with and without misses."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lab.logits import minimum_budget, run_jobs
from lab.variants import VARIANTS
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.format.pack import open_pack

SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("name", ["type-MXFP4", "type-F16", "two-groups"])
def test_no_bad_memory_access(name: str, tmp_path: Path) -> None:
    path = VARIANTS[name](tmp_path)
    pack = open_pack(convert(path).path)
    llama = {"n_gpu_layers": -1, "expert_pack": True, "expert_cache_reserve": 0, "expert_ram": 0}
    common = {"stock": False, "model": str(path), "batches": [64, 7, 1, 1, 2], "greedy": 8}
    caches = {"resident": pack.payload_bytes, "passes": minimum_budget(pack)}
    jobs = [{**common, "id": kind, "llama": {**llama, "expert_cache": cache}} for kind, cache in caches.items()]
    log = tmp_path / "memcheck.log"
    memcheck = [str(SANITIZER), "--tool", "memcheck", "--error-exitcode", "97", "--log-file", str(log)]
    runs = run_jobs(jobs, tmp_path / "logits", under=memcheck)
    assert "ERROR SUMMARY: 0 errors" in log.read_text()
    for kind in caches:
        assert "error" not in runs[kind].found, runs[kind].found
