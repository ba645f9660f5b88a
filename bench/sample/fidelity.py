"""Does llama.cpp compute what the training program computes?

    python -m bench.sample.fidelity MODEL.gguf REFERENCE.json

The trainer writes REFERENCE.json: ids of some strings, and the log-probability that the model, with the weights of the
GGUF in float32, gives each token of one text.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
import numpy as np

from lab.stock import ROOT, environment, llama_class

TEXT = (
    'In the beginning, God created the heavens and the earth. He said to them, "Don\'t be afraid."\n'
    "Emma Woodhouse, handsome, clever, and rich, had lived nearly twenty-one years in the world.\n"
)


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("reference", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(model: Path, reference: Path) -> None:
    """Prints a JSON object: strings with other ids, and the largest and mean difference of log-probabilities."""
    variables = environment(stock=True)
    if os.environ.get("LLAMA_CPP_LIB_PATH") != variables["LLAMA_CPP_LIB_PATH"]:
        os.chdir(ROOT)
        command = [sys.executable, "-m", "bench.sample.fidelity", str(model.resolve()), str(reference.resolve())]
        os.execve(sys.executable, command, variables)
    expected = json.loads(reference.read_text())
    f32 = 0  # cache types: a rounded cache would add to the difference
    llm = llama_class(stock=True)(
        str(model), n_ctx=512, logits_all=True, verbose=False, type_k=f32, type_v=f32, n_threads=2
    )
    other = [
        case["text"]
        for case in expected["tokens"]
        if llm.tokenize(case["text"].encode(), add_bos=False, special=False) != case["ids"]
    ]
    ids = llm.tokenize(expected["text"].encode(), special=False)
    llm.eval(ids)
    logits = llm.scores[: len(ids) - 1].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    found = np.take_along_axis(logits, np.array(ids[1:])[:, None], 1)[:, 0] - np.log(np.exp(logits).sum(1))
    difference = np.abs(found - np.array(expected["log_probabilities"]))
    print(json.dumps({"other_ids": other, "difference_max": difference.max(), "difference_mean": difference.mean()}))
    llm.close()


if __name__ == "__main__":
    main()
