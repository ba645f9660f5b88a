"""Checks and measures the CUDA backend against stock on a machine with a GPU; JSONL results.

    python -m bench.gpu identity OUT.jsonl --models DIR     logits of small models, packed against stock, all on the GPU
    python -m bench.gpu resident OUT.jsonl --models DIR     speed with every expert resident, and without a pack
    python -m bench.gpu missing OUT.jsonl MODEL             delivery of missing experts beside the drive's raw rate
    python -m bench.gpu tiers OUT.jsonl MODEL               speed with experts in VRAM and host memory

Stock is found as lab.stock says, or in the folder EXPERT_PACK_STOCK_LIB names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from bench.banner import banner
from bench.drive import raw_rate
from bench.gpu.speed import in_process
from lab.make_model import make_model
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.format.pack import open_pack

# the shapes that the prototype was measured with
RESIDENT_MODELS: dict[str, dict[str, Any]] = {
    "8x64-4096x2048-mxfp4": dict(
        preset="qwen3moe", type="MXFP4", n_layer=8, n_expert=64, n_expert_used=6, n_embd=4096, n_ff_exp=2048,
        n_head=32, n_head_kv=4, head_dim=128, n_vocab=4096, n_ctx=8192, trunk_type="Q8_0",
    ),
    "48x32-2048x768-mxfp4": dict(
        preset="qwen3moe", type="MXFP4", n_layer=48, n_expert=32, n_expert_used=8, n_embd=2048, n_ff_exp=768,
        n_head=32, n_head_kv=4, head_dim=64, n_vocab=4096, n_ctx=8192, trunk_type="Q8_0",
    ),
}  # fmt: skip


def write(out: Path, record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")


@click.group(help=(__doc__ or "").split("\n", maxsplit=1)[0])
def main() -> None:
    pass


@main.command(help="Speed with every expert resident, against stock; and of the patched library without a pack.")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--models", type=click.Path(path_type=Path), default=Path("build/gpu-models"), show_default=True)
@click.option("--rounds", default=2, show_default=True, help="Interleaved rounds.")
def resident(out: Path, models: Path, rounds: int) -> None:
    models.mkdir(parents=True, exist_ok=True)
    write(out, {"benchmark": "banner", **banner(models)})
    for name, sizes in RESIDENT_MODELS.items():
        path = models / f"{name}.gguf"
        if not path.exists():
            make_model(path, **sizes)
        pack = open_pack(convert(path).path)
        cache = pack.payload_bytes
        common = {"model": str(path), "prompts": [512, 2048], "n_steps": 128, "n_repeats": 7}
        packed = {"expert_pack": True, "expert_cache": cache, "expert_cache_reserve": 0}
        for round_ in range(rounds):
            for kind, stock, options in (("stock", True, {}), ("no-pack", False, {}), ("packed", False, packed)):
                found = in_process({**common, "stock": stock, "options": options})
                write(out, {"benchmark": "resident", "model": name, "side": kind, "round": round_, **found})
        found = in_process({**common, "stock": False, "options": packed}, "measure_in_turn")
        write(out, {"benchmark": "resident-in-turn", "model": name, "n_layers": sizes["n_layer"], **found})


@main.command(help="Delivery of missing experts with half of them in VRAM, beside the raw rate of the same pack.")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--label", default="disk", show_default=True)
@click.option("--share", default=0.5, show_default=True, help="Share of the experts that fits.")
@click.option("--steps", default=64, show_default=True)
@click.option("--splits", default="64", show_default=True, help="Parts of a block, one run each.")
def missing(out: Path, model: Path, label: str, share: float, steps: int, splits: str) -> None:
    pack = open_pack(convert(model).path)
    raw = raw_rate.in_process(pack.path, 64, 16, gpu=True)
    for n_splits in map(int, splits.split(",")):
        packed = {
            "expert_pack": True,
            "expert_cache": int(pack.payload_bytes * share),
            "expert_cache_reserve": 0,
            "expert_ram": 0,
            "expert_read_splits": n_splits,
            "expert_stage_slots": 16,
        }
        common = {
            "model": str(model),
            "stock": False,
            "prompts": [64],
            "n_steps": steps,
            "n_repeats": 1,
            "n_warm_up": 3,  # most experts have been read, and their checksums compared, by then
        }
        found = in_process({**common, "options": packed})
        stats = found.get("expert_stats", {})
        delivered = stats["read_bytes"] / stats["wait_s"] if stats.get("wait_s") else None
        record = {"benchmark": "missing", "model": model.stem, "drive": label, "share": share, "read_splits": n_splits}
        record |= {"stage_slots": 16, "verify": "first", "raw": raw, "delivered_bytes_per_s": delivered}
        for name in ("raw_bytes_per_s", "raw_copy_bytes_per_s"):
            record[f"delivered_over_{name.removesuffix('_bytes_per_s')}"] = delivered / raw[name] if delivered else None
        record["misses_per_load"] = stats["misses"] / stats["provider_calls"] if stats.get("provider_calls") else None
        write(out, {**record, **found})


@main.command(help="Speed with shares of the experts in VRAM and in host memory that the GPU reads in place.")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--label", default="disk", show_default=True)
@click.option(
    "--shares", default="15+0,15+15,15+50,15+85,100+0", show_default=True, help="Percent in VRAM + in host memory."
)
@click.option("--steps", default=64, show_default=True)
@click.option("--warm-up", default=8, show_default=True, help="Prompts of 512 tokens with 20 steps each, before.")
def tiers(out: Path, model: Path, label: str, shares: str, steps: int, warm_up: int) -> None:
    pack = open_pack(convert(model).path)
    for text in shares.split(","):
        vram, host = (int(pack.payload_bytes * float(share) / 100) for share in text.split("+"))
        packed = {"expert_pack": True, "expert_cache": vram, "expert_cache_reserve": 0, "expert_ram": host}
        job = {
            "model": str(model),
            "stock": False,
            "prompts": [64],
            "n_steps": steps,
            "n_repeats": 3,
            "n_warm_up": warm_up,
        }
        record = {"benchmark": "tiers", "model": model.stem, "drive": label, "share_vram_host": text}
        write(out, {**record, "vram_bytes": vram, "host_bytes": host, **in_process({**job, "options": packed})})


@main.command(help="Logits of small models, packed against stock, all layers on the GPU.")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--models", type=click.Path(path_type=Path), default=Path("build/gpu-models"), show_default=True)
def identity(out: Path, models: Path) -> None:
    from lab.identity import compare, record_of, small_models
    from lab.variants import VARIANTS

    write(out, {"benchmark": "banner", **banner(models)})
    for case, stock, ours in compare(small_models(models, list(VARIANTS), None), models / "logits"):
        write(out, {"benchmark": "identity", **record_of(case, stock, ours)})


if __name__ == "__main__":
    main()
