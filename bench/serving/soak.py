"""Four clients stream random prompts from one server for minutes, some cancelled, with the smallest expert cache.

    python -m bench.serving.soak [--minutes 10] [--kind packed|ours|stock] [--out FILE.jsonl]

Every answer that is not cancelled must equal what a fresh stock server gives for the same prompt alone, at temperature 0.
That is comparable because nothing in this set-up adds up in an order that depends on what else is in the batch: all
matrices are K-quants (llama.cpp multiplies F32, F16, BF16 and some other types by another kernel when a batch has two or
more tokens), attention is the flash kernel with a quantized memory (which has no tiled or split path), weights are not
repacked, and no prompt is cached. One order is left that does: where in the memory a sequence's tokens lie, which depends on
what lay there before, is the order in which attention adds them. So stock differs from itself in one answer of a
thousand. An answer that differs is therefore looked for among those that stock gives under the same load, and is wrong
only if stock does not give it either.

Memory and open files of the server must stay flat: first and last tenth of the samples.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from bench.banner import banner, report
from bench.serving.launchers import KINDS
from bench.serving.models import STORY_SHAPE, write_story_model
from bench.serving.process import Server, running
from lab.stock import ROOT, STOCK_LIB
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import ExpertPackError
from llama_expert_pack.pypack.format.pack import open_pack

VOCABULARY = STOCK_LIB.parent / "source" / "models" / "ggml-vocab-llama-spm.gguf"
RESULTS = ROOT / "bench" / "results" / "server_soak.jsonl"
K_QUANTS = {role: ("Q4_K",) for role in ("gate", "up", "down")}
SHAPE = replace(
    STORY_SHAPE,
    n_embd=256,
    head_dim=64,
    n_ff=256,
    n_ff_exp=256,
    n_expert=32,
    n_expert_used=4,
    trunk_type="Q6_K",
    expert_types=K_QUANTS,
)
N_CLIENTS = 4
ARGUMENTS = (
    *("--parallel", str(N_CLIENTS), "--ctx-size", "4096", "--threads", "1", "--no-ui"),
    *("--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"),
    *("--no-repack", "--cache-ram", "0", "--ctx-checkpoints", "0"),
)
WORDS = "a the and one two little old red house tree river girl boy dog went saw said found lost again never 3 7 !"
CANCELLED_SHARE = 0.25
SAMPLE_EVERY_S = 1.0


@dataclass(frozen=True)
class Question:
    prompt: str
    n_predict: int

    def body(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "n_predict": self.n_predict, "temperature": 0, "cache_prompt": False}


@dataclass
class Seen:
    """What the clients saw; list.append is atomic."""

    first_token_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    compared: list[Question] = field(default_factory=list)
    cancelled: list[Question] = field(default_factory=list)
    wrong: list[dict[str, str]] = field(default_factory=list)


def questions(n: int, seed: int) -> list[Question]:
    dice = random.Random(seed)
    return [
        Question(" ".join(dice.choices(WORDS.split(), k=dice.randint(1, 60))), dice.randint(8, 64)) for _ in range(n)
    ]


def expected_answers(asked: Sequence[Question], model: Path, log: Path) -> dict[Question, str]:
    """Each question alone to a stock server that was started for it."""
    answers = {}
    for question in asked:
        with running("stock", model, log, ARGUMENTS) as server:
            answers[question] = "".join(event["content"] for event in server.stream("/completion", question.body()))
    return answers


def ask(server: Server, question: Question, stop_after: int | None, expected: str, seen: Seen) -> None:
    """One streamed answer; closes the connection after `stop_after` events if that comes first."""
    parts: list[str] = []
    last = time.perf_counter()
    with closing(server.stream("/completion", question.body())) as events:
        for n, event in enumerate(events, 1):
            now = time.perf_counter()
            (seen.between_tokens_s if n > 1 else seen.first_token_s).append(now - last)
            last = now
            parts.append(event["content"])
            if n == stop_after:
                seen.cancelled.append(question)
                return
    seen.compared.append(question)
    if "".join(parts) != expected:
        seen.wrong.append({"prompt": question.prompt, "expected": expected, "found": "".join(parts)})


def client(server: Server, expected: dict[Question, str], end: float, seed: int, seen: Seen) -> None:
    """Asks random questions until ``end`` (monotonic seconds), and cancels some."""
    dice = random.Random(seed)
    pool = list(expected)
    while time.monotonic() < end:
        question = dice.choice(pool)
        stop_after = dice.randint(1, question.n_predict - 1) if dice.random() < CANCELLED_SHARE else None
        ask(server, question, stop_after, expected[question], seen)


def sample(pid: int) -> tuple[float, int]:
    """Resident memory in MiB and the number of open descriptors."""
    status = Path(f"/proc/{pid}/status").read_text()
    rss_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    return rss_kib / 1024, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def soak(
    server: Server, expected: dict[Question, str], seconds: float, seed: int
) -> tuple[Seen, list[tuple[float, int]]]:
    """Runs the clients; what they saw, and samples of the server's memory and descriptors."""
    seen, samples, errors = Seen(), [], []
    end = time.monotonic() + seconds

    def run(number: int) -> None:
        try:
            client(server, expected, end, seed + number, seen)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, N_CLIENTS + 1)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        samples.append(sample(server.process.pid))
        time.sleep(SAMPLE_EVERY_S)
    if errors:
        raise RuntimeError(f"a client failed: {errors[0]!r}") from errors[0]
    return seen, samples


def percentile_ms(values: Sequence[float], percent: int) -> float:
    return round(1000 * statistics.quantiles(values, n=100)[percent - 1], 2)


def growth(samples: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Medians of the second tenth (the first is warm-up) and the last tenth of the samples."""
    tenth = max(1, len(samples) // 10)
    found = {}
    for name, values in zip(("rss_mib", "descriptors"), zip(*samples, strict=True), strict=True):
        early, late = values[tenth : 2 * tenth] or values[:1], values[-tenth:]
        found[f"{name}_early"], found[f"{name}_late"] = statistics.median(early), statistics.median(late)
    return found


def smallest_cache_bytes(pack: Path) -> int:
    """One working set: the experts of one token in one layer."""
    top_k = int(SHAPE.n_expert_used)  # type: ignore[arg-type]
    return top_k * max(layer.block_bytes for layer in open_pack(pack).layers)


def measure(kind: str, minutes: float, n_questions: int, seed: int, folder: Path) -> tuple[dict[str, Any], Seen]:
    """The record of one soak, and what the clients saw. ``folder``: for the model, its pack and logs."""
    model = write_story_model(folder / "soak.gguf", VOCABULARY, SHAPE)
    pack = convert(model).path
    cache = str(smallest_cache_bytes(pack))
    own = ("--expert-pack", str(pack), "--expert-cache", cache) if kind == "packed" else ()
    expected = expected_answers(questions(n_questions, seed), model, folder / "alone.log")
    with running(kind, model, folder / "soak.log", (*ARGUMENTS, *own)) as server:
        seen, samples = soak(server, expected, 60 * minutes, seed)
        counters = server.expert_counters()
    strange = seen.wrong
    if seen.wrong and kind != "stock":
        with running("stock", model, folder / "stock.log", ARGUMENTS) as server:
            among_others, _ = soak(server, expected, 60 * minutes, seed)
        strange = [answer for answer in seen.wrong if answer not in among_others.wrong]
    result = {
        **{"kind": kind, "minutes": minutes, "cache_bytes": int(cache) if own else None, "seed": seed},
        **{
            "answers_compared": len(seen.compared),
            "answers_different": len(seen.wrong),
            "answers_not_of_stock": len(strange),
            "cancelled": len(seen.cancelled),
        },
        "prompts": len(set(seen.compared)),
        "first_token_ms_p50": percentile_ms(seen.first_token_s, 50),
        "first_token_ms_p99": percentile_ms(seen.first_token_s, 99),
        "between_tokens_ms_p50": percentile_ms(seen.between_tokens_s, 50),
        "between_tokens_ms_p99": percentile_ms(seen.between_tokens_s, 99),
        **growth(samples),
        "expert_counters": counters,
    }
    return result, seen


def verdict(result: dict[str, Any]) -> list[str]:
    """What is wrong, in sentences."""
    wrong = []
    if result["answers_not_of_stock"] and result["kind"] != "stock":
        wrong.append(f"{result['answers_not_of_stock']} answers are not those of stock, alone or under the same load")
    if result["rss_mib_late"] > 1.05 * result["rss_mib_early"] + 8:
        wrong.append(f"memory grew from {result['rss_mib_early']:.0f} to {result['rss_mib_late']:.0f} MiB")
    if result["descriptors_late"] > result["descriptors_early"] + 8:  # a few connections come and go
        wrong.append(f"open descriptors grew from {result['descriptors_early']} to {result['descriptors_late']}")
    return wrong


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--kind", type=click.Choice(KINDS), default="packed", show_default=True)
@click.option("--prompts", "n_questions", default=40, show_default=True, help="Different random prompts.")
@click.option("--seed", default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True, help="Appended to.")
def main(minutes: float, kind: str, n_questions: int, seed: int, out: Path) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=ROOT / "build") as scratch:
            result, seen = measure(kind, minutes, n_questions, seed, Path(scratch))
            machine = banner(Path(scratch))
    except (ExpertPackError, FileNotFoundError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    report({**machine, **result}, out)
    for example in seen.wrong[:3]:
        click.echo(json.dumps(example))
    for sentence in verdict(result):
        click.echo(sentence)
    if verdict(result):
        sys.exit(1)


if __name__ == "__main__":
    main()
