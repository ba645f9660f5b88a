"""compute-sanitizer finds no bad memory access: a prompt in passes and at once, decode steps with and without misses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.stock import ROOT, environment
from pypack.convert import convert
from pypack.pack import open_pack
from tests.compare import minimum_budget
from tests.models import VARIANTS

SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("name", ["type-MXFP4", "type-F16", "two-groups"])
def test_no_bad_memory_access(name: str, tmp_path: Path) -> None:
    path = VARIANTS[name](tmp_path)
    pack = open_pack(convert(path).path)
    llama = {"n_gpu_layers": -1, "n_ctx": 256, "expert_pack": True, "expert_cache_reserve": 0}
    jobs = [
        {"id": kind, "stock": False, "model": str(path), "batches": [64, 7, 1, 1, 2], "greedy": 8}
        | {"llama": {**llama, "expert_cache": cache}}
        for kind, cache in (("resident", pack.payload_bytes), ("passes", minimum_budget(pack)))
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    runner = [sys.executable, str(ROOT / "tests" / "logits_runner.py"), str(tmp_path / "jobs.json"), str(tmp_path)]
    run = subprocess.run(
        [str(SANITIZER), "--tool", "memcheck", "--error-exitcode", "97", *runner],
        env=environment(stock=False),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert "ERROR SUMMARY: 0 errors" in run.stdout + run.stderr
    for job in jobs:
        assert "error" not in json.loads((tmp_path / f"{job['id']}.json").read_text())
