"""Records traces of small models with the routing of large ones: prompts in batches, then single tokens.

    python -m bench.replaying.record FOLDER [--model MODEL.gguf --pack PACK]

Without --model it writes cut-down models of three presets into FOLDER first. Random weights route by their routers'
favourites and by what a token looks like; a trained model, given with --model, routes by what it learned.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.make_model import make_model
from pypack.convert import convert
from pypack.errors import ExpertPackError

# presets with their layers, experts and top-k cut to what a CPU runs in a minute
CUTS: dict[str, dict[str, Any]] = {
    "qwen3moe": {"n_layer": 16, "n_expert": 64, "n_expert_used": 4},
    "dsv4": {"n_layer": 12, "n_expert": 64, "n_expert_used": 4},
    "k3": {"n_layer": 10, "n_expert": 96, "n_expert_used": 6},
}
SMALL: dict[str, Any] = {"n_embd": 256, "n_ff_exp": 256, "n_ff": 256, "n_head": 8, "n_vocab": 4096, "type": "Q8_0"}
REQUESTS = ((96, 60), (40, 100), (200, 60), (10, 120))  # tokens of the prompt, of the answer


def record(model: Path, pack: Path, trace: Path, *, cache_share: float = 0.25, seed: int = 1) -> None:
    """Run REQUESTS on the model and record them. The answer is sampled, so that random weights do not repeat."""
    from llama_expert_pack import Llama

    cache = int(pack.stat().st_size * cache_share)
    llm = Llama(
        model,
        expert_pack=pack,
        expert_cache=cache,
        expert_trace=trace,
        n_ctx=512,
        n_batch=64,
        n_threads=1,
        verbose=False,
    )
    random = np.random.default_rng(seed)
    try:
        for n_prompt, n_answer in REQUESTS:
            llm.reset()
            llm.eval(random.integers(0, llm.n_vocab(), n_prompt).tolist())
            for _ in range(n_answer):
                llm.eval([llm.sample(temp=1.0)])
    finally:
        llm.close()


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="A model of yours instead.")
@click.option("--pack", type=click.Path(path_type=Path), help="Its pack; default: beside it, made if it is not there.")
def main(folder: Path, model: Path | None, pack: Path | None) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        models = {model.stem: model} if model else {name: folder / f"{name}.gguf" for name in CUTS}
        for name, path in models.items():
            if model is None and not path.exists():
                make_model(path, name, **CUTS[name], **(SMALL | ({"latent": 256} if name == "k3" else {})))
            record(path, pack or convert(path).path, folder / f"{name}.trace")
            print(f"recorded {folder / name}.trace")
    except (ExpertPackError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
