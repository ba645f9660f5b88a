"""Ten requests, one at a time, through stock's llama-server and ours with a pack: texts, rates, hits, bytes a token.

    python -m bench.serving.ten_requests [--model MODEL.gguf] [--cache SIZE] [--out FILE.jsonl]

The workload of the published SSD Expert Pack measurements: five instructions and five multiple-choice questions
(bench/data), 200 tokens each, temperature 0, prompt cache off. Stock runs with --no-repack, as ours does with a pack.
Without --model it uses the trained sample, with a quarter of the experts in memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from bench.banner import banner
from bench.demo import SAMPLE
from bench.serving.process import Server, running
from lab.stock import ROOT
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import ExpertPackError
from llama_expert_pack.pypack.format.pack import open_pack

REQUESTS = ROOT / "bench" / "data" / "ten_requests.json"
RESULTS = ROOT / "bench" / "results" / "ten_requests.jsonl"
N_TOKENS = 200
COMMON = ("--parallel", "1", "--ctx-size", "2048", "--no-ui", "--cache-ram", "0")

Answer = dict[str, Any]


def ask(server: Server, request: dict[str, str]) -> Answer:
    """Text, rates in tokens/s, and what the cache did for this request."""
    before = server.expert_counters()
    body = {"messages": [{"role": "user", "content": request["prompt"]}], "max_tokens": N_TOKENS}
    reply = server.post("/v1/chat/completions", {**body, "temperature": 0, "cache_prompt": False, "ignore_eos": True})
    after = server.expert_counters()
    timings = reply["timings"]
    message = reply["choices"][0]["message"]
    answer = {
        "id": request["id"],
        "set": request["set"],
        "text": (message.get("reasoning_content") or "") + (message.get("content") or ""),
        "prompt_tokens": timings["prompt_n"],
        "generated_tokens": timings["predicted_n"],
        "prefill_s": timings["prompt_ms"] / 1000,
        "decode_s": timings["predicted_ms"] / 1000,
    }
    for name in ("hits", "misses", "read_bytes") if after else ():
        answer[name] = int(after[f"{name}_total"] - before[f"{name}_total"])
    return answer


def run(kind: str, model: Path, requests: list[dict[str, str]], log: Path, arguments: tuple[str, ...]) -> list[Answer]:
    """The answers of a fresh server of this kind, in order."""
    with running(kind, model, log, (*COMMON, *arguments)) as server:
        return [ask(server, request) for request in requests]


def summary(answers: list[Answer]) -> dict[str, float]:
    """Rates over all answers: tokens by seconds, hits by lookups, bytes by generated tokens (prefill included)."""

    def total(name: str) -> float:
        return float(sum(answer[name] for answer in answers))

    rates = {
        "prefill_tokens_per_s": total("prompt_tokens") / total("prefill_s"),
        "decode_tokens_per_s": total("generated_tokens") / total("decode_s"),
    }
    if "hits" in answers[0]:
        rates["hit_rate"] = total("hits") / max(1.0, total("hits") + total("misses"))
        rates["read_bytes_per_token"] = total("read_bytes") / total("generated_tokens")
    return rates


def table(results: dict[str, list[Answer]]) -> str:
    """Markdown, one row a server and set of requests."""
    lines = [
        "| server | requests | prefill tokens/s | decode tokens/s | hit rate | MB read per token | texts as stock's |",
        "|---|---|---|---|---|---|---|",
    ]
    stock = {answer["id"]: answer["text"] for answer in results["stock"]}
    for kind, answers in results.items():
        for name in dict.fromkeys(answer["set"] for answer in answers):
            chosen = [answer for answer in answers if answer["set"] == name]
            rates = summary(chosen)
            same = sum(answer["text"] == stock[answer["id"]] for answer in chosen)
            cache = (
                f"{rates['hit_rate']:.1%} | {rates['read_bytes_per_token'] / 1e6:.1f}"
                if "hit_rate" in rates
                else "- | -"
            )
            lines.append(
                f"| {kind} | {name} | {rates['prefill_tokens_per_s']:.2f} | {rates['decode_tokens_per_s']:.2f} | "
                f"{cache} | {same} of {len(chosen)} |"
            )
    return "\n".join(lines)


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.option("--model", type=click.Path(path_type=Path), default=SAMPLE, help="A mixture-of-experts GGUF of yours.")
@click.option("--cache", help="Memory for experts, e.g. 20GiB; default: a quarter of all experts.")
@click.option("--threads", default=2, show_default=True)
@click.option("--requests", type=click.Path(exists=True, path_type=Path), default=REQUESTS, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True, help="Appended to.")
def main(model: Path, cache: str | None, threads: int, requests: Path, out: Path) -> None:
    try:
        pack = open_pack(convert(model).path)
        budget = cache or str(pack.payload_bytes // 4)
        arguments = {
            "stock": ("--no-repack", "--threads", str(threads)),
            "packed": ("--expert-pack", str(pack.path), "--expert-cache", budget, "--threads", str(threads)),
        }
        chosen = json.loads(requests.read_text())
        with tempfile.TemporaryDirectory() as scratch:
            results = {
                kind: run(kind, model, chosen, Path(scratch) / f"{kind}.log", own) for kind, own in arguments.items()
            }
    except (ExpertPackError, FileNotFoundError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    record = {"machine": banner(model.parent), "model": model.name, "cache": budget, "threads": threads}
    rates = {kind: summary(answers) for kind, answers in results.items()}
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**record, "rates": rates, "answers": results}) + "\n")
    click.echo(table(results))
    different = [
        ours["id"]
        for ours, stock in zip(results["packed"], results["stock"], strict=True)
        if ours["text"] != stock["text"]
    ]
    if different:
        click.echo(f"texts differ: {', '.join(different)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
