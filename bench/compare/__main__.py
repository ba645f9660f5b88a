"""Stock llama.cpp against the expert pack: is it faster, by how much, and what bounds it.

    python -m bench.compare --model M.gguf [--pack P] [--ram-cap 8GiB] [--cache 15%] [--prompts FILE] [--out X.jsonl]

Each side runs in a process of its own, in turn, with a cold page cache and under the same cap on memory. The raw rate
of the drive is measured in the same run. Results go to the JSONL file as they come, so that a run that is cut off
leaves what it had; bench.compare.report makes table and charts of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.banner import banner
from bench.compare import conditions
from bench.compare.report import markdown, write_report
from bench.compare.results import read_lines, summaries
from bench.compare.sides import PROCESS_BYTES, SideSpec, Sizes, plan_sides
from bench.drive import raw_rate
from bench.gpu.samples import gpu_samples, vram_free_bytes
from lab.memory_cap import memory_cap
from lab.stock import ROOT, STOCK_LIB, environment
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import ExpertPackError, UsageError
from llama_expert_pack.pypack.format.pack import Pack, open_pack
from llama_expert_pack.pypack.placement.batch import MOST
from llama_expert_pack.pypack.source.match import check_source
from llama_expert_pack.pypack.system.host_memory import host_memory_free
from llama_expert_pack.pypack.values.sizes import parse_size

PROCESS_GPU_BYTES = 1 << 30  # the trunk is in VRAM then


class Comparison:
    """One model, one drive, one set of conditions."""

    def __init__(self, pack: Pack, model: Path, arguments: dict[str, Any]) -> None:
        self.pack, self.model, self.arguments = pack, model, arguments
        self.files = [model.parent / shard.name for shard in pack.manifest.source.shards]
        self.files = [path for path in self.files if path.exists()] or [model]
        self.out: Path = arguments["out"]
        self.prompts = read_prompts(arguments["prompts"])
        self.deadline = time.monotonic() + (arguments["time_limit"] or float("inf"))
        vram = vram_free_bytes() if arguments["gpu"] and (STOCK_LIB / "libggml-cuda.so").exists() else None
        model_bytes = sum(path.stat().st_size for path in self.files)
        experts = pack.payload_bytes
        beside_experts = PROCESS_BYTES + model_bytes - experts if vram is None else PROCESS_GPU_BYTES
        self.sizes = Sizes(
            model=model_bytes,
            experts=experts,
            cache=parse_size(arguments["cache"], experts),
            cap=ram_cap_bytes(arguments["ram_cap"], beside_experts, experts),
            memory_free=host_memory_free(),
            vram=vram,
            ram=parse_size(arguments["ram"], experts) if arguments["ram"] else 0,
            n_layers=len(pack.layers),
        )
        self.cap_problem = ""
        if arguments["cap_if_possible"]:
            self.check_cap()
        self.name = f"{model.stem} {arguments['label']} {time.strftime('%Y-%m-%dT%H:%M:%S')}"

    def check_cap(self) -> None:
        """Leaves the cap out, and notes why, where it can't be set."""
        try:
            with memory_cap(self.sizes.cap):
                pass
        except UsageError as error:
            self.cap_problem = str(error)
            self.sizes = replace(self.sizes, cap=None)

    def write(self, kind: str, **record: Any) -> None:
        """Appends a record to the results."""
        line = json.dumps({"bench": "compare", "comparison": self.name, "kind": kind, **record})
        with self.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def run(self) -> None:
        """All sides, round by round, beside the drive. Raises UsageError."""
        a = self.arguments
        options = {"expert_read_splits": a["read_splits"], "expert_stage_slots": a["stage_slots"]}
        sides, left_out = plan_sides(self.sizes, str(self.pack.path), options, offload=a["offload"])
        if a["sides"]:
            wanted = a["sides"].split(",")
            if unknown := sorted(set(wanted) - {spec.name for spec in sides} - set(left_out)):
                raise UsageError(
                    f"--sides: there is no {', '.join(unknown)} here, only {', '.join(s.name for s in sides)}"
                )
            sides = [spec for spec in sides if spec.name in wanted]
        with conditions.read_ahead([*self.files, self.pack.path], a["read_ahead_kb"]) as read_ahead:
            self.write_conditions(sides, left_out, read_ahead)
            for round_ in range(a["rounds"]):
                self.measure_drive(round_)
                for spec in sides if round_ % 2 == 0 else reversed(sides):  # who runs first changes
                    if spec.reference and round_ > 0:
                        continue
                    if time.monotonic() > self.deadline:
                        say(f"time limit reached: {spec.name} of round {round_} and what follows is left out")
                        return
                    self.measure_side(spec, round_)

    def write_conditions(self, sides: list[SideSpec], left_out: dict[str, str], read_ahead: str) -> None:
        """What results can't be read without: machine, model, sizes, how cold, what was left out."""
        a, s = self.arguments, self.sizes
        facts = banner(self.pack.path.parent)
        build = {"build_commit": facts["commit"], "cpu_info": facts["cpu"], "gpu_info": facts["gpu"]}
        self.write(
            "conditions",
            **facts,
            **build,
            label=a["label"],
            model_filename=self.model.name,
            model_type=self.pack.manifest.model.architecture,
            model_size=s.model,
            expert_bytes=s.experts,
            block_bytes=raw_rate.block_facts(self.pack)[0],
            n_layers=len(self.pack.layers),
            n_expert=self.pack.layers[0].n_expert,
            top_k=self.pack.manifest.model.expert_used_count,
            cache_bytes=s.cache,
            host_bytes=s.ram,
            ram_cap_bytes=s.cap,
            n_warm=a["warm"],
            n_threads=a["threads"],
            n_ubatch=a["ubatch"],
            token_skew=None if a["prompts"] else a["token_skew"],
            cold=conditions.cold_sentence(a["cold"]),
            read_ahead=read_ahead,
            titles={spec.name: spec.title for spec in sides},
            references=[spec.name for spec in sides if spec.reference],
            left_out=left_out,
            cap_problem=self.cap_problem,
            read_splits=a["read_splits"],
            stage_slots=a["stage_slots"],
        )

    def measure_drive(self, round_: int) -> None:
        """The raw rate of the pack's drive, in a process of its own. Raises UsageError."""
        a = self.arguments
        gpu = self.sizes.vram is not None
        found = raw_rate.in_process(self.pack.path, a["read_splits"], a["stage_slots"], gpu)
        self.write("raw", round=round_, **found)
        say(f"round {round_}: raw O_DIRECT {found['raw_bytes_per_s'] / 1e9:.2f} GB/s")

    def batch_of(self, spec: SideSpec) -> int | None:
        """Tokens of a physical batch; None: Llama chooses. Where ours does, computing alone has the largest that it might."""
        a = self.arguments
        own: dict[str, int | None] = {"ours": None, "ours-all": min(MOST, a["ctx"])} if a["own_ubatch"] else {}
        given: int = a["ubatch"]
        return own.get(spec.name, given)

    def measure_side(self, spec: SideSpec, round_: int) -> None:
        """One side, cold, in a process of its own under the cap; a side that fails is a record, too."""
        a = self.arguments
        limit_s = min(a["side_limit"], max(1.0, self.deadline - time.monotonic()))
        conditions.drop_caches([*self.files, self.pack.path], a["cold"])
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            job = {
                "out": str(out), "model": str(self.model), "stock": spec.stock, "cpu_layers": spec.cpu_layers,
                "gpu_layers": spec.gpu_layers, "n_warm": a["warm"], "direct_io": spec.direct_io, "gpu": spec.gpu, "options": spec.options, "n_threads": a["threads"],
                "n_ubatch": self.batch_of(spec), "n_ctx": a["ctx"], "n_prompt": a["n_prompt"], "n_gen": a["n_gen"],
                "n_repeats": a["repeats"], "token_skew": a["token_skew"], "prompts": self.prompts,
            }  # fmt: skip
            with memory_cap(self.sizes.cap if spec.capped else None) as cap, gpu_samples() as gpu:
                error = run_side(
                    cap.command([sys.executable, "-m", "bench.compare.side", json.dumps(job)]), spec, limit_s
                )
                found: dict[str, Any] = {"error": error} if error else json.loads(out.read_text())
                found |= {"cgroup_peak_bytes": cap.peak_bytes(), "page_cache_end_bytes": cap.page_cache_bytes()}
        found["vram_peak_bytes"] = gpu.vram_peak_bytes()
        samples = [*found.get("samples", []), *([found["cold"]] if "cold" in found else [])]
        phases = [phase for sample in samples for phase in (sample["prefill"], sample["decode"])]
        for phase in [*phases, *([found["settled"]] if "settled" in found else [])]:
            phase["joules"] = gpu.joules(*phase.pop("window"))
        self.write("run", side=spec.name, round=round_, **found)
        say(f"round {round_}: {spec.name:16} {describe(found)}")


def ram_cap_bytes(cap: str | None, beside_experts_bytes: int, expert_bytes: int) -> int | None:
    """A size; or a share such as "15%", which leaves the page cache that share of the experts beside all else."""
    if cap is None:
        return None
    if cap.strip().endswith("%"):
        return beside_experts_bytes + parse_size(cap, expert_bytes)
    return parse_size(cap, 0)


def run_side(command: list[str], spec: SideSpec, limit_s: float) -> str:
    """Empty, or why there is no result."""
    try:
        run = subprocess.run(
            command, env=environment(spec.stock), cwd=ROOT, capture_output=True, text=True, check=False,
            timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not ready after {limit_s:.0f} s"
    if run.returncode == 0:
        return ""
    if run.returncode in (-9, 137):
        return "killed: out of memory under the cap"
    return f"exit status {run.returncode}: {_reason(run.stderr or run.stdout)}"


def _reason(output: str) -> str:
    """The line that says why a process ended: not the backtrace that follows a failed assertion."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    asserted = [line for line in lines if "GGML_ASSERT" in line or "CUDA error" in line]
    return (asserted[:1] or lines[-1:] or ["it said nothing"])[0][-600:]


def describe(found: dict[str, Any]) -> str:
    """A line about one side's result."""
    if "error" in found:
        return str(found["error"])
    sample = found["samples"][0]
    return (
        f"prefill {sample['prefill']['tokens_per_s']:.2f}, decode {sample['decode']['tokens_per_s']:.2f} tokens/s, "
        f"{sample['decode']['read_bytes'] / sample['decode']['n_tokens'] / 1e6:.0f} MB per decoded token"
    )


def read_prompts(path: Path | None) -> list[str]:
    """One prompt a line, or JSON: a list of strings or of objects with a `prompt`."""
    if path is None:
        return []
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        prompts = [line for line in text.splitlines() if line.strip()]
    else:
        try:
            found = json.loads(text)
            if not isinstance(found, list):
                raise TypeError(f"found {type(found).__name__}")
            prompts = [item if isinstance(item, str) else str(item["prompt"]) for item in found]
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{path}: expected a JSON list of prompts, or of objects with a prompt ({error})"
            ) from error
    if not prompts:
        raise UsageError(f"{path}: there is no prompt in it: write one a line")
    return prompts


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.option("--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option(
    "--pack", "pack_path", type=click.Path(path_type=Path), help="Default: beside the model; made if missing."
)
@click.option("--ram-cap", help='Limit on memory and page cache: "8GiB"; or "15%" of the experts beside all else.')
@click.option("--cap-if-possible", is_flag=True, help="Where memory cannot be capped, say so and go on without.")
@click.option("--cache", default="25%", show_default=True, help='Ours: "20GiB", or a share of all experts.')
@click.option("--ram", help='Ours: "20GiB", or a share of all experts, of host memory that the GPU reads in place.')
@click.option("--offload", is_flag=True, help="Also stock with what fits into as much VRAM as the cache of ours.")
@click.option("--warm", default=0, show_default=True, help="Random prompts, with their steps, before what is timed.")
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="One a line, or JSON.")
@click.option(
    "--n-prompt",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Random tokens to prefill, without --prompts.",
)
@click.option("--n-gen", type=click.IntRange(1), default=32, show_default=True, help="Tokens to decode.")
@click.option("--token-skew", default=1.0, show_default=True, help="Exponent of Zipf's law of random tokens; 0: none.")
@click.option(
    "--repeats", type=click.IntRange(1), default=1, show_default=True, help="Random prompts for each process."
)
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="Interleaved rounds.")
@click.option("--label", default="disk", show_default=True, help="Name of the drive in the results.")
@click.option("--sides", help="Only these, with commas, of those there are.")
@click.option("--gpu/--no-gpu", default=True, show_default=True, help="Use the GPU if there is one.")
@click.option("--threads", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True)
@click.option("--ctx", default=1024, show_default=True)
@click.option("--ubatch", default=512, show_default=True)
@click.option("--own-ubatch", is_flag=True, help="Ours chooses the size of its batches.")
@click.option("--read-splits", default=64, show_default=True)
@click.option("--stage-slots", default=12, show_default=True, help="Reads in flight; also of the raw measurement.")
@click.option("--read-ahead-kb", default=128, show_default=True)
@click.option(
    "--cold", type=click.Choice(["machine", "files", "off"]), help="What leaves the page cache before a side."
)
@click.option("--time-limit", type=float, help="Seconds after which the comparison ends.")
@click.option("--side-limit", default=300.0, show_default=True, help="Seconds for one side.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("compare.jsonl"), show_default=True
)
@click.option("--report", type=click.Path(file_okay=False, path_type=Path), help="Folder for report.md and charts.")
def main(model: Path, pack_path: Path | None, **arguments: Any) -> None:
    try:
        pack = open_pack(pack_path) if pack_path else open_pack(convert(model).path)
        check_source(pack, model)
        arguments["cold"] = arguments["cold"] or ("machine" if os.geteuid() == 0 else "files")
        comparison = Comparison(pack, model, arguments)
        comparison.run()
        everything = read_lines(comparison.out)
        lines = [line for line in everything if line["comparison"] == comparison.name]
        for summary in summaries(lines):
            comparison.write("summary", **summary)
        print(markdown(lines, everything))
        if arguments["report"]:
            write_report(read_lines(comparison.out), arguments["report"])
    except (ExpertPackError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
