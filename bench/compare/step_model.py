"""A model of one decode step: what the drive, the copy to the GPU, computing and the host take.

    step = fetches * delivery(blocks per fetch) + computing + host
    GPU: delivery(k) = max(latency + k * read, k * copy) + the copies of the last wave
    CPU: delivery(k) = latency + k * read - computing of the layer's experts that are there

A wave is as many parts as there are reading threads: they end at about the same time, and what is copied then is not
hidden behind reading. On a CPU resident experts are computed while the others are read.

Every parameter is measured in the run whose rate is predicted, but not from that rate: latency and read are fitted to
bursts of reads without a model, copy is measured alone, computing is stock's step with all weights in memory, and host
is what ours takes beyond that with all experts in memory. How many blocks a step misses is counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.compare.results import Line, of_kind


@dataclass(frozen=True)
class Step:
    """Seconds of one decode step, by what they are spent on; `read_s` is what computing does not hide, `copy_s` what
    reading does not."""

    read_s: float
    copy_s: float
    compute_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        return self.read_s + self.copy_s + self.compute_s + self.host_s


@dataclass(frozen=True)
class StepModel:
    """Seconds, but for the counts of one step. `copy_s` is 0 without a GPU; `basis` says where computing is from.

    `wave_blocks`: blocks whose parts are read at the same time. `overlap_s`: computing that goes on during a fetch.
    """

    latency_s: float
    read_s: float
    copy_s: float
    compute_s: float
    host_s: float
    fetches: float
    blocks: float
    wave_blocks: float
    basis: str
    overlap_s: float = 0.0

    def step(self) -> Step:
        """One decode step: fetches one after the other, each a latency and its blocks."""
        if self.fetches == 0:
            return Step(0.0, 0.0, self.compute_s, self.host_s)
        k = self.blocks / self.fetches
        read = self.latency_s + k * self.read_s
        exposed = max(0.0, k * self.copy_s - read) + min(k, self.wave_blocks) * self.copy_s
        waited = max(0.0, read - self.overlap_s)
        return Step(self.fetches * waited, self.fetches * exposed, self.compute_s, self.host_s)


def fit_bursts(bursts: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """(latency, seconds a block): the line through the mean time of k blocks, by least relative squares."""
    sizes = np.array([int(k) for k in bursts[0]], dtype=float)
    times = np.array([statistics.fmean(burst[k] for burst in bursts) for k in bursts[0]])
    slope, start = np.polyfit(sizes, times, 1, w=1 / times)
    return max(float(start), 0.0), max(float(slope), 0.0)


def build(lines: Sequence[Line], everything: Sequence[Line] = ()) -> StepModel | None:
    """The model of ours in one comparison; None if what it needs was not measured.

    `everything`: all lines of the file, where references of the same model are looked for if these have none.
    """
    conditions, raw = of_kind(lines, "conditions")[0], of_kind(lines, "raw")
    ours = [sample["decode"] for run in _runs(lines, "ours") for sample in run["samples"]]
    if not raw or not ours:
        return None
    n_steps = sum(part["n_tokens"] for part in ours)
    compute_s, host_s, basis = _computing(lines, everything, conditions)
    if compute_s is None:
        return None
    latency_s, read_s = fit_bursts([line["burst_s"] for line in raw])
    fetches = sum(part["stats"]["provider_calls"] for part in ours) / n_steps
    blocks = sum(part["stats"]["loads"] for part in ours) / n_steps
    share_there = 1 - blocks / fetches / conditions["top_k"] if fetches else 0.0
    copies = [conditions["block_bytes"] / line["copy_bytes_per_s"] for line in raw if "copy_bytes_per_s" in line]
    return StepModel(
        latency_s=latency_s,
        read_s=read_s,
        copy_s=statistics.median(copies) if copies else 0.0,
        compute_s=compute_s,
        host_s=host_s,
        fetches=fetches,
        blocks=blocks,
        wave_blocks=raw[0]["wave_blocks"],
        basis=basis,
        overlap_s=0.0 if conditions["gpu"] else max(0.0, share_there) * compute_s / conditions["n_layers"],
    )


def measured_step_s(lines: Sequence[Line]) -> tuple[float, float] | None:
    """Mean seconds of a decode step of ours, and how many of them computing waited for experts."""
    parts = [sample["decode"] for run in _runs(lines, "ours") for sample in run["samples"]]
    n_steps = sum(part["n_tokens"] for part in parts)
    if not parts:
        return None
    return sum(part["s"] for part in parts) / n_steps, sum(part["stats"]["wait_s"] for part in parts) / n_steps


def _runs(lines: Sequence[Line], side: str) -> list[Line]:
    return [line for line in of_kind(lines, "run") if line["side"] == side and "error" not in line]


def _seconds_without_waiting(runs: Sequence[Line]) -> float | None:
    parts = [sample["decode"] for run in runs for sample in run["samples"]]
    if not parts:
        return None
    return statistics.fmean((p["s"] - p.get("stats", {}).get("wait_s", 0.0)) / p["n_tokens"] for p in parts)


def _computing(lines: Sequence[Line], everything: Sequence[Line], conditions: Line) -> tuple[float | None, float, str]:
    """Seconds of computing and of the host in a step, and what they come from."""
    same = [
        line["comparison"]
        for line in of_kind(everything, "conditions")
        if all(line[key] == conditions[key] for key in ("model_filename", "model_size", "gpu", "cpu", "n_threads"))
    ]
    places = [list(lines), [line for line in everything if line["comparison"] in same]]
    for place in places:
        whole = _seconds_without_waiting(_runs(place, "ours-all"))
        stock = _seconds_without_waiting(_runs(place, "stock-gpu" if conditions["gpu"] else "stock-direct-io"))
        if whole is not None and stock is not None and stock <= whole:
            return stock, whole - stock, "stock and ours with all experts in memory"
        if whole is not None:
            return whole, 0.0, "ours with all experts in memory, the host's work included"
    return None, 0.0, ""


@dataclass(frozen=True)
class Target:
    """A machine and a model at full depth to extrapolate to. Rates in bytes/s; VRAM's relative to the one measured."""

    title: str
    arch: str
    n_layers: int
    hit_rate: float
    drive_bytes_per_s: float
    copy_bytes_per_s: float
    vram_over_measured: float


# The published machine: RTX 5090 (1.79 TB/s of VRAM; an H200 has 4.8), PCIe 5 drive and slot. Hit rates as published.
PUBLISHED = (
    Target("DeepSeek-V4-Flash, RTX 5090, PCIe 5 SSD", "deepseek4", 43, 0.50, 13e9, 50e9, 1.79 / 4.8),
    Target("Kimi-K3, RTX 5090, PCIe 5 SSD", "kimi-k3", 92, 0.20, 13e9, 50e9, 1.79 / 4.8),
)


def extrapolate(model: StepModel, conditions: Line, target: Target) -> StepModel:
    """The model at full depth on the target: computing and host grow with the layers, computing also as VRAM is slower."""
    depth = target.n_layers / conditions["n_layers"]
    top_k, block_bytes = conditions["top_k"], conditions["block_bytes"]
    return replace(
        model,
        read_s=block_bytes / target.drive_bytes_per_s,
        copy_s=block_bytes / target.copy_bytes_per_s,
        compute_s=model.compute_s * depth / target.vram_over_measured,
        host_s=model.host_s * depth,
        fetches=target.n_layers * (1 - target.hit_rate**top_k),
        blocks=target.n_layers * top_k * (1 - target.hit_rate),
    )


def section(lines: Sequence[Line], everything: Sequence[Line] = ()) -> str:
    """Markdown: predicted beside measured, and what the model says of the published machine; empty if it cannot say."""
    model, measured = build(lines, everything), measured_step_s(lines)
    if model is None or measured is None:
        return ""
    measured_s, waited_s = measured
    conditions, step = of_kind(lines, "conditions")[0], model.step()
    text = [
        "### Where a step goes",
        "",
        "| | tokens/s | ms a step | read | copy not hidden | computing | host |",
        "|---|---|---|---|---|---|---|",
        _row("model", step),
        f"| measured | {1 / measured_s:.3g} | {measured_s * 1e3:.1f} | {waited_s * 1e3:.1f} with copies | "
        f"| {(measured_s - waited_s) * 1e3:.1f} with host | |",
    ]
    targets = [t for t in PUBLISHED if t.arch == conditions["model_type"] and conditions["gpu"]]
    text += [_row(f"PREDICTION: {t.title}", extrapolate(model, conditions, t).step()) for t in targets]
    text += [
        "",
        f"- The model is {step.total_s / measured_s - 1:+.0%} off. {model.blocks:.1f} blocks a step in {model.fetches:.1f} "
        f"fetches; {model.latency_s * 1e3:.2f} ms a fetch and {model.read_s * 1e3:.2f} ms a block to read, "
        f"{model.copy_s * 1e3:.2f} ms a block to copy; computing from {model.basis}.",
    ]
    text += [
        f"- {t.title} is a prediction, not a measurement: {t.n_layers} layers, hit rate {t.hit_rate:.0%}, drive "
        f"{t.drive_bytes_per_s / 1e9:g} GB/s, copies {t.copy_bytes_per_s / 1e9:g} GB/s, computing scaled by the "
        "bandwidth of VRAM and the number of layers, latency as measured here."
        for t in targets
    ]
    return "\n".join(text)


def _row(title: str, step: Step) -> str:
    parts = (step.total_s, step.read_s, step.copy_s, step.compute_s, step.host_s)
    return f"| {title} | {1 / step.total_s:.3g} | " + " | ".join(f"{s * 1e3:.1f}" for s in parts) + " |"
