"""Records the traces in bench/data/traces, which docs/POLICY.md compares the policies on.

    python -m bench.traces.record FOLDER                               # all of them but the published ones
    python -m bench.traces.record FOLDER --model MODEL.gguf            # a model of yours, with the same texts

`sample` is the trained model in bench/data: what it was asked and what it answered, sampled; `held-out` the same with
other texts, on which no policy was tuned. The others have random weights and the true number of experts of large models
at small widths; they route by their routers' favourites and by what a token looks like, so their tokens are drawn as
those of text are distributed.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from lab.make_model import make_model
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import ExpertPackError

DATA = Path(__file__).parents[1] / "data"
SAMPLE = DATA / "sample-moe.gguf"
NARROW: dict[str, Any] = {
    "n_embd": 256, "n_ff_exp": 64, "n_ff": 256, "n_head": 8, "head_dim": 64, "n_vocab": 4096,
    "type": "Q8_0", "trunk_type": "Q8_0",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {  # by preset; strong favourites, dsv4's and k3's as in gpu_compare.sh
    "qwen3moe": {"n_layer": 12, "router_spread": 0.8},
    "dsv4": {"n_layer": 8, "router_spread": 0.9},
    "k3": {"n_layer": 7, "router_spread": 1.0, "latent": 256},
}
OPENINGS = (
    "She was",
    "It was a truth which nobody in the village could deny, that",
    "And it happened in those days that the king sent messengers",
    "The letter was short, and she read it twice before she could believe that",
    "Blessed is the man who",
    "My dear sister, I have so much to tell you since we came to Bath;",
    "Then he took bread, and gave it to them, saying,",
    "Mr. Elliot walked up and down the room in silence, until at last",
    "These are the names of the sons who went down with their father:",
    "There was to be a ball on Thursday, and every young lady in the neighbourhood",
)
HELD_OUT = (
    "In the evening the whole family",
    "The servant of the house said to him,",
    "I will sing of your",
    "Captain Wentworth had not",
    "There were in the same country",
    "Her father, who had never",
    "A certain man had two sons;",
    "Elinor was grieved to see",
    "And the sea",
    "You must allow me to tell you, sir,",
)
N_ANSWER = 150  # tokens
N_DRAWN = ((96, 200), (40, 250), (200, 150), (10, 300), (150, 200))  # tokens of a prompt, of an answer


def texts_of(name: str) -> list[str]:
    if name == "held-out":
        return [*HELD_OUT, *HELD_OUT]
    requests = [request["prompt"] for request in json.loads((DATA / "ten_requests.json").read_text())]
    return [text for pair in zip(OPENINGS, requests, strict=True) for text in pair]


def record(model: Path, pack: Path, trace: Path, texts: Sequence[str], *, cache_share: float = 0.25) -> None:
    """Run the texts, or, on a model without a tokenizer, drawn tokens: prompts in batches, then single tokens."""
    from llama_expert_pack import Llama

    llm = Llama(
        model,
        expert_pack=pack,
        expert_cache=int(pack.stat().st_size * cache_share),
        expert_policy="freq-age",  # has no constants: the check against live counters holds when those of others change
        expert_trace=trace,
        n_ctx=512,
        n_batch=64,
        n_threads=1,
        verbose=False,
    )
    try:
        has_text = llm.metadata["tokenizer.ggml.model"] not in ("no_vocab", "test")
        for token in _answers(llm, texts) if has_text else _drawn(llm):
            llm.eval([token])
    finally:
        llm.close()


def _answers(llm: Any, texts: Sequence[str]) -> Iterator[int]:
    """Of one text after another, each with its own seed."""
    for seed, text in enumerate(texts):
        llm.reset()
        llm.set_seed(seed)
        llm.eval(llm.tokenize(text.encode())[:300])
        for _ in range(N_ANSWER):
            yield llm.sample(temp=0.8)


def _drawn(llm: Any) -> Iterator[int]:
    """Tokens by Zipf's law."""
    random = np.random.default_rng(1)
    weight = 1 / np.arange(1, llm.n_vocab() + 1)
    for n_prompt, n_answer in N_DRAWN:
        tokens = random.choice(llm.n_vocab(), n_prompt + n_answer, p=weight / weight.sum()).tolist()
        llm.reset()
        llm.eval(tokens[:n_prompt])
        yield from tokens[n_prompt:]


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="A model of yours instead.")
@click.option("--pack", type=click.Path(path_type=Path), help="Its pack; default: beside it, made if it is not there.")
def main(folder: Path, model: Path | None, pack: Path | None) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if model is not None:
            _save(folder, model.stem, model, pack or convert(model).path)
            return
        with tempfile.TemporaryDirectory() as made:
            pack = convert(SAMPLE, Path(made)).path
            for name in ("sample", "held-out"):
                _save(folder, name, SAMPLE, pack)
            for name, sizes in MODELS.items():
                path = make_model(Path(made) / f"{name}.gguf", name, **NARROW, **sizes)
                _save(folder, name, path, convert(path).path)
    except (ExpertPackError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _save(folder: Path, name: str, model: Path, pack: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        trace = Path(made) / "run.trace"
        record(model, pack, trace, texts_of(name))
        path = folder / f"{name}.trace.xz"
        path.write_bytes(lzma.compress(trace.read_bytes(), preset=9))
    print(f"recorded {path}")


if __name__ == "__main__":
    main()
