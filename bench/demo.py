"""The main job, shown: a GGUF becomes an expert pack and generates with a quarter of its experts in memory.

    python -m bench.demo [--model MODEL.gguf] [--cache SIZE] [--tokens N] [--prompt TEXT] [--no-compare]

Without --model it takes the small trained model in bench/data. It converts, verifies, generates from the pack, and compares
tokens and logits with stock llama.cpp.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from lab.stock import ROOT, environment, llama_class
from llama_expert_pack.pypack.command.progress import for_stderr
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.errors import ExpertPackError
from llama_expert_pack.pypack.format.pack import Pack, open_pack

SAMPLE = ROOT / "bench" / "data" / "sample-moe.gguf"
PROMPT = "Give an example of a bias that can exist in an AI algorithm."
SAMPLE_PROMPT = "Elizabeth walked into the garden, and"  # of the kind that the sample was trained on


def generate(job: dict[str, Any], out: Path) -> None:
    """Tokens and all logits of one side: OUT.npz, and what the cache counted. Both sides draw the same random numbers."""
    llm = llama_class(job["stock"])(job["model"], n_ctx=job["n_ctx"], logits_all=True, verbose=False, **job["options"])
    prompt = llm.tokenize(job["prompt"].encode(), special=False)
    start = time.perf_counter()
    llm.eval(prompt)
    prefill_s = time.perf_counter() - start
    tokens: list[int] = []
    rng = np.random.default_rng(job["seed"])
    start = time.perf_counter()
    for _ in range(job["tokens"]):
        tokens.append(choose(llm.scores[llm.n_tokens - 1], job["temperature"], rng))
        llm.eval(tokens[-1:])
    decode_s = time.perf_counter() - start
    np.savez(out, tokens=np.array(tokens), logits=llm.scores[: llm.n_tokens])
    found = {
        "text": llm.detokenize(tokens).decode(errors="replace"),
        "prefill_tokens_per_s": len(prompt) / prefill_s,
        "decode_tokens_per_s": len(tokens) / decode_s,
        "stats": None if job["stock"] else llm.expert_stats().to_dict(),
    }
    llm.close()
    out.with_suffix(".json").write_text(json.dumps(found))


def choose(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """The likeliest token at temperature 0, else one drawn from the softmax."""
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return int(rng.choice(len(weights), p=weights / weights.sum()))


def run_side(job: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Generates in a process of its own; what it found, and the arrays."""
    out = folder / f"{'stock' if job['stock'] else 'ours'}.npz"
    command = [sys.executable, "-m", "bench.demo", "--job", json.dumps({**job, "out": str(out)})]
    if subprocess.run(command, env=environment(job["stock"]), cwd=ROOT, check=False).returncode != 0:
        raise click.ClickException(
            f"{'stock llama.cpp' if job['stock'] else 'the packed model'} did not run; see above"
        )
    with np.load(out) as arrays:
        return json.loads(out.with_suffix(".json").read_text()), dict(arrays)


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.option("--model", type=click.Path(path_type=Path), default=SAMPLE, help="A mixture-of-experts GGUF of yours.")
@click.option("--output", type=click.Path(path_type=Path), help="Where to write the pack; default: beside the model.")
@click.option("--cache", help="Memory for experts, e.g. 20GiB; default: a quarter of all experts.")
@click.option("--tokens", default=48, show_default=True, help="Tokens to generate.")
@click.option("--prompt", help="Text to go on from.")
@click.option("--temperature", type=click.FloatRange(0), help="Default: 0.7 for the trained sample, else 0.")
@click.option("--seed", default=1, show_default=True)
@click.option("--compare/--no-compare", default=True, show_default=True, help="Run stock llama.cpp too.")
@click.option("--job", hidden=True)
def main(job: str | None, **options: Any) -> None:
    try:
        if job is not None:
            described = json.loads(job)
            generate(described, Path(described["out"]))
            return
        show(**options)
    except (ExpertPackError, FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def show(
    model: Path,
    output: Path | None,
    cache: str | None,
    tokens: int,
    prompt: str | None,
    temperature: float | None,
    seed: int,
    compare: bool,
) -> None:
    """Converts, checks, generates and compares, and prints each; click.ClickException if stock differs."""
    print(f"model    {model}")
    is_sample = model == SAMPLE
    if is_sample and output is None:  # the repository holds the model, not its pack
        output = ROOT / "demo" / f"{model.stem}.expert-pack"
        output.parent.mkdir(exist_ok=True)
    prompt = prompt or (SAMPLE_PROMPT if is_sample else PROMPT)
    pack = show_pack(model, output)
    if temperature is None:
        temperature = 0.7 if is_sample else 0.0
    common = {"model": str(model), "prompt": prompt, "tokens": tokens, "n_ctx": 512 if is_sample else 1024}
    common |= {"temperature": temperature, "seed": seed}
    options = {"expert_pack": str(pack.path), "expert_cache": cache or pack.payload_bytes // 4, "expert_ram": 0}
    with tempfile.TemporaryDirectory() as scratch:
        ours, our_arrays = run_side({**common, "stock": False, "options": options}, Path(scratch))
        show_ours(ours, prompt, tokens, cache)
        if compare:
            stock, arrays = run_side({**common, "stock": True, "options": {}}, Path(scratch))
            show_comparison(stock, arrays, our_arrays)


def show_pack(model: Path, output: Path | None) -> Pack:
    start = time.perf_counter()
    converted = convert(model, output, progress=for_stderr("convert"))
    pack = open_pack(converted.path)
    seconds = time.perf_counter() - start
    how = "found complete" if converted.reused else f"written in {seconds:.1f} s"
    experts = sum(layer.n_expert for layer in pack.layers)
    print(f"pack     {pack.path}: {experts} experts of {len(pack.layers)} layers, {_mib(pack.payload_bytes)}, {how}")
    start = time.perf_counter()
    verify(pack.path, deep=True, source=model)
    print(f"verify   every block is the model's, byte for byte ({time.perf_counter() - start:.1f} s)")
    return pack


def show_ours(ours: dict[str, Any], prompt: str, tokens: int, cache: str | None) -> None:
    stats = ours["stats"]
    print(f"text     {(prompt + ours['text'])!r}")
    print(
        f"cache    {cache or 'a quarter of the experts'}: hit rate {stats['hit_rate']:.1%}, {_mib(stats['read_bytes'])} read, "
        f"{_mib(stats['read_bytes'] / max(tokens, 1))} per generated token, {stats['evictions']} evictions"
    )
    print(f"speed    {_speed(ours)}")


def show_comparison(stock: dict[str, Any], arrays: dict[str, Any], our_arrays: dict[str, Any]) -> None:
    print(f"stock    {_speed(stock)}, all in memory")
    difference = float(np.abs(arrays["logits"].astype(np.float64) - our_arrays["logits"]).max())
    same = bool((arrays["tokens"] == our_arrays["tokens"]).all())
    print(f"compare  tokens {'identical' if same else 'DIFFERENT'}, max |logit difference| {difference:g}")
    if not same or difference != 0:
        raise click.ClickException("the packed model does not compute what stock computes")


def _speed(found: dict[str, Any]) -> str:
    return f"prefill {found['prefill_tokens_per_s']:.1f}, decode {found['decode_tokens_per_s']:.1f} tokens/s"


def _mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
