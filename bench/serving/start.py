"""From the start of llama-server to the first token of an answer, with nothing of the model in the page cache.

    python -m bench.serving.start MODEL [--rounds 3] [--cache SIZE] [--threads N] [--out results.jsonl]

Alternates between stock (mmap, as it does by itself, with --no-repack) and ours with the pack beside MODEL. Before each
start the model and the pack leave the page cache. The result is the median of the rounds, seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import click

from bench.banner import banner, report
from bench.compare.conditions import drop_caches
from bench.serving.process import free_port
from lab.stock import STOCK_LIB, environment
from llama_expert_pack.pypack.gguf.model import read_model
from llama_expert_pack.pypack.source.match import find_pack

PROMPT = "Once upon a time, in a village by the sea, there lived"


def first_token_s(command: list[str]) -> float:
    """Seconds until a server's first streamed token; the server is stopped then."""
    port = free_port()
    body = json.dumps({"prompt": PROMPT, "n_predict": 1, "stream": True, "temperature": 0}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", body, {"Content-Type": "application/json"})
    variables = environment(stock=False)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once
    start = time.perf_counter()
    server = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=variables,
    )
    try:
        while True:
            try:
                with urllib.request.urlopen(request, timeout=600) as reply:
                    reply.readline()
                    return time.perf_counter() - start
            except (urllib.error.URLError, ConnectionError):  # not there, or still loading
                if server.poll() is not None:
                    raise SystemExit(f"error: the server ended with {server.returncode}: {' '.join(command)}") from None
                time.sleep(0.01)
    finally:
        server.kill()
        server.wait()


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--cache", default="auto", show_default=True, help="--expert-cache")
@click.option("--threads", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path))
def main(model: Path, rounds: int, cache: str, threads: int, out: Path | None) -> None:
    common = ["-m", str(model), "-c", "1024", "-t", str(threads), "--no-ui"]
    commands = {
        "stock": [str(STOCK_LIB / "llama-server"), *common, "--no-repack"],
        "pack": [
            sys.executable,
            "-m",
            "llama_expert_pack.bridge.server",
            *common,
            "--expert-pack",
            "auto",
            "--expert-cache",
            cache,
        ],
    }
    files = [shard.path for shard in read_model(model).shards] + [find_pack(model)]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            drop_caches(files, "files")
            seconds[name].append(first_token_s(command))
    result = {
        **banner(model.parent),
        "model": model.name,
        "model_bytes": sum(path.stat().st_size for path in files[:-1]),
        "expert_cache": cache,
        "threads": threads,
        **{f"{name}_first_token_s": round(statistics.median(values), 2) for name, values in seconds.items()},
        "rounds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
    }
    report(result, out)


if __name__ == "__main__":
    main()
