"""Clients that stream, cancel and come back, against a server with the smallest cache; then every text is checked.

    python -m bench.server_soak MODEL [--minutes 10] [--clients 4] [--cache SIZE] [--out results.jsonl]

Each client asks for random prompts out of a pool at temperature 0 and hangs up in the middle of one answer out of four.
Afterwards a fresh server answers each prompt of the pool alone; the tokens of every answer that was not cancelled must
begin that text. Both servers compute one token at a time (--ubatch-size 1) and keep no prompts, but even so a few prompts
were seen to get another text beside others than alone, with and without a pack: compare with a run with --no-pack.
Memory and descriptors are those of the server's process.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import click

from bench.banner import banner, report
from bench.stock import environment
from pypack.pack import Pack, find_pack, open_pack

WORDS = [
    "river",
    "stone",
    "light",
    "seven",
    "under",
    "cold",
    "the",
    "a",
    "walks",
    "sings",
    "blue",
    "quick",
    "paper",
    "moon",
    "and",
    "of",
    "north",
    "apple",
]
N_PREDICT_MAX = 48


@dataclass
class Answer:
    prompt: int
    n_predict: int
    tokens: list[int]


@dataclass
class Client:
    answers: list[Answer] = field(default_factory=list)
    n_cancelled: int = 0
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)


def smallest_bytes(pack: Pack) -> int:
    """One working set for each size of block."""
    top_k = pack.manifest.model.expert_used_count or 1
    least: dict[int, int] = {}
    for layer in pack.layers:
        least[layer.block_bytes] = max(least.get(layer.block_bytes, 0), min(top_k, layer.n_expert))
    return sum(block_bytes * n for block_bytes, n in least.items())


@contextmanager
def server(flags: list[str]) -> Iterator[tuple[int, int]]:
    """Port and process id of a ready server."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    command = [sys.executable, "-m", "bridge.server", "--port", str(port), *flags]
    log = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(stock=False))
    try:
        while True:
            try:
                if request(port, "GET", "/health").status == 200:
                    break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(
                        f"error: the server ended with {process.returncode}: {' '.join(command)}"
                    ) from None
            time.sleep(0.1)
        yield port, process.pid
        if process.poll() is not None:
            raise SystemExit(f"error: the server ended with {process.returncode}")
    finally:
        process.terminate()
        process.wait(60)


def request(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    return connection.getresponse()


def pieces(port: int, prompt: str, n_predict: int) -> Iterator[list[int]]:
    """The tokens of an answer as they arrive, mostly one by one. Closing it hangs up."""
    body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"return_tokens": True, "cache_prompt": False}
    with request(port, "POST", "/completion", body) as reply:
        if reply.status != 200:
            raise RuntimeError(reply.read().decode())
        for line in reply:
            if line.startswith(b"data: "):
                piece = json.loads(line[6:])
                if "error" in piece:
                    raise RuntimeError(str(piece))
                if piece["tokens"]:
                    yield piece["tokens"]


def ask_until(end: float, port: int, prompts: list[str], seed: int, client: Client) -> None:
    chance = random.Random(seed)
    while time.monotonic() < end:
        index, n_predict = chance.randrange(len(prompts)), chance.randint(8, N_PREDICT_MAX)
        stop_after = chance.randint(1, n_predict - 1) if chance.random() < 0.25 else None
        got: list[int] = []
        last = time.perf_counter()
        stream = pieces(port, prompts[index], n_predict)
        for piece in stream:
            now = time.perf_counter()
            (client.between_s if got else client.first_s).append(now - last)
            last = now
            got += piece
            if stop_after is not None and len(got) >= stop_after:
                stream.close()  # type: ignore[attr-defined]
                break
        if stop_after is None:
            client.answers.append(Answer(index, n_predict, got))
        else:
            client.n_cancelled += 1


def process_state(pid: int) -> tuple[float, int]:
    """MiB resident and open descriptors."""
    status = Path(f"/proc/{pid}/status").read_text()
    rss_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return rss_kib / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir()))


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49], 4), "p99": round(cuts[98], 4)}


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--minutes", type=click.FloatRange(0.1), default=10.0, show_default=True)
@click.option("--clients", "n_clients", type=click.IntRange(1), default=4, show_default=True)
@click.option("--cache", help="--expert-cache; default: the smallest.")
@click.option("--no-pack", is_flag=True, help="The same without a pack.")
@click.option("--prompts", "n_prompts", type=click.IntRange(1), default=40, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path))
def main(
    model: Path, minutes: float, n_clients: int, cache: str | None, no_pack: bool, n_prompts: int, out: Path | None
) -> None:
    pack = open_pack(find_pack(model))
    if cache is None:
        cache = str(smallest_bytes(pack))
    chance = random.Random(0)
    prompts = [" ".join(chance.choices(WORDS, k=chance.randint(3, 40))) for _ in range(n_prompts)]
    pack_flags = ["--expert-pack", "none", "--no-repack"] if no_pack else ["--expert-pack", "auto"]
    flags = ["-m", str(model), *pack_flags, "--expert-cache", cache, "--expert-cache-reserve", "0"]
    flags += ["-np", str(n_clients), "-c", str(512 * n_clients), "-ub", "1", "--cache-ram", "0", "--no-ui"]

    clients = [Client() for _ in range(n_clients)]
    states: list[tuple[float, int]] = []
    with server(flags) as (port, pid):
        end = time.monotonic() + minutes * 60
        threads = [
            threading.Thread(target=ask_until, args=(end, port, prompts, seed, client))
            for seed, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            states.append(process_state(pid))
            time.sleep(min(5, minutes * 60 / 40))

    answers = [answer for client in clients for answer in client.answers]
    with server(flags) as (port, _):
        alone = {
            index: list(chain.from_iterable(pieces(port, prompts[index], N_PREDICT_MAX)))
            for index in sorted({answer.prompt for answer in answers})
        }
    different = [a for a in answers if a.tokens != alone[a.prompt][: a.n_predict]]
    half = len(states) // 2
    result = {
        **banner(model.parent),
        "model": model.name,
        "minutes": minutes,
        "clients": n_clients,
        "expert_cache": None if no_pack else cache,
        "answers": len(answers),
        "cancelled": sum(client.n_cancelled for client in clients),
        "different": len(different),
        "first_token_s": percentiles([s for client in clients for s in client.first_s]),
        "between_tokens_s": percentiles([s for client in clients for s in client.between_s]),
        "rss_mib_max": {
            "first half": round(max(rss for rss, _ in states[:half]), 1),
            "second half": round(max(rss for rss, _ in states[half:]), 1),
        },
        "descriptors_max": {
            "first half": max(n for _, n in states[:half]),
            "second half": max(n for _, n in states[half:]),
        },
    }
    report(result, out)
    if different:
        raise SystemExit(f"error: {len(different)} of {len(answers)} texts differ, the first for prompt {different[0]}")


if __name__ == "__main__":
    main()
