"""Runs models with stock and with packs, and compares their logits bit by bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lab.stock import ROOT, environment
from llama_expert_pack.pypack.format.pack import Pack
from llama_expert_pack.pypack.placement.budget import working_set_bytes

BATCHES = [64, 7, 1, 13, 2, *[1] * 32]


def minimum_budget(pack: Pack, top_k: int | None = None) -> int:
    """Bytes of the smallest cache: one working set in every pool."""
    top_k = top_k or pack.manifest.model.expert_used_count or 1
    return working_set_bytes(pack.layers, top_k)


@dataclass
class Run:
    """What logits_runner found for one job."""

    logits: np.ndarray | None
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def stats(self) -> dict[str, Any]:
        """The counters at the end of the run; KeyError for stock."""
        return self.found["expert_stats"]  # type: ignore[no-any-return]


def run_jobs(jobs: list[dict[str, Any]], folder: Path, under: Sequence[str] = ()) -> dict[str, Run]:
    """Runs all jobs, those of stock in one process, ours in another; a job that kills its process has an error.

    under: a command that the processes run under, such as a memory checker with its options.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stock in (True, False):
        left = [job for job in jobs if job["stock"] == stock]
        while left:
            left = left[run_until_death(left, folder, under) :]
    runs = {}
    for job in jobs:
        logits = folder / f"{job['id']}.npy"
        found = json.loads((folder / f"{job['id']}.json").read_text())
        runs[job["id"]] = Run(np.load(logits) if "error" not in found else None, found)
    return runs


def run_until_death(jobs: list[dict[str, Any]], folder: Path, under: Sequence[str]) -> int:
    """Runs jobs in one process; how many it ran. The last of them may have killed it, and then says so."""
    job_file = folder / f"{jobs[0]['id']}.jobs.json"
    job_file.write_text(json.dumps(jobs))
    run = subprocess.run(
        [*under, sys.executable, str(ROOT / "lab" / "logits_runner.py"), str(job_file), str(folder)],
        env=environment(jobs[0]["stock"]),
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode == 0:
        return len(jobs)
    started = run.stdout.split()
    assert started, f"exit status {run.returncode}\n{run.stderr[-3000:]}"
    error = f"the process died with exit status {run.returncode}: {run.stderr[-1500:]}"
    (folder / f"{started[-1]}.json").write_text(json.dumps({"error": error}))
    return len(started)


def differences(stock: Run, ours: Run) -> str:
    """Empty if both ran and every bit is the same, else what differs."""
    if stock.logits is None or ours.logits is None:
        return f"stock: {stock.found.get('error', 'ran')}; ours: {ours.found.get('error', 'ran')}"
    if stock.logits.shape != ours.logits.shape:
        return f"shapes {stock.logits.shape} and {ours.logits.shape}"
    wrong = np.flatnonzero((stock.logits.view(np.uint32) != ours.logits.view(np.uint32)).any(axis=1))
    if len(wrong) == 0:
        return ""
    largest = np.nanmax(np.abs(stock.logits.astype(np.float64) - ours.logits))
    return f"{len(wrong)} of {len(stock.logits)} rows differ, first {wrong[0]}, by at most {largest:g}"
