"""Evaluates models in a process of its own and writes their logits: the same code for stock and for ours.

Usage: logits_runner.py JOBS.json OUT_DIR

JOBS.json: a list of {"id", "model", "stock": bool, "llama": {keywords of Llama}, "batches": [n_tokens, ...],
"greedy": how many tokens to choose after them, optional}. With
stock true the libraries come from LLAMA_CPP_LIB_PATH, which the caller sets; else from the installed package. One
process must not mix the two. Writes OUT_DIR/ID.npy, float32 [sum of batches, n_vocab], and OUT_DIR/ID.json with what
else is known: expert_stats, greedy (the chosen tokens), error.

Tokens are the same for every run of a model: (7 * i + i * i) % n_vocab.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from lab.stock import llama_class


def evaluate(llm: Any, batches: list[int]) -> np.ndarray:
    """float32 [sum of batches, n_vocab]: the logits of every token, evaluated in batches of so many tokens."""
    import llama_cpp

    n_vocab = llm.n_vocab()
    has_memory = bool(llama_cpp.llama_get_memory(llm._ctx.ctx))
    rows = []
    start = 0
    for n_tokens in batches:
        tokens = [(7 * i + i * i) % n_vocab for i in range(start, start + n_tokens)]
        if has_memory:
            llm.eval(tokens)
        else:  # a diffusion model: each batch stands alone
            llm._batch.set_batch(batch=tokens, n_past=0, logits_all=True)
            llm._ctx.decode(llm._batch)
        logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(n_tokens * n_vocab,))
        rows.append(logits.reshape(n_tokens, n_vocab).copy())
        start += n_tokens
    return np.concatenate(rows)


def choose(llm: Any, n: int) -> list[int]:
    """The n tokens that follow, each the likeliest one after those before."""
    import llama_cpp

    if not llama_cpp.llama_get_memory(llm._ctx.ctx):
        return []
    n_vocab = llm.n_vocab()
    chosen: list[int] = []
    for _ in range(n):
        logits = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(n_vocab,))
        chosen.append(int(logits.argmax()))
        llm.eval(chosen[-1:])
    return chosen


def run(job: dict[str, Any], out: Path) -> None:
    """One job; what it raises becomes its ``error``."""
    found: dict[str, Any] = {}
    try:
        options = {"n_ctx": 256, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, **job["llama"]}
        llm = llama_class(job["stock"], job.get("repack", False))(
            job["model"], logits_all=True, verbose=False, **options
        )
        try:
            np.save(out / f"{job['id']}.npy", evaluate(llm, job["batches"]))
            found["greedy"] = choose(llm, job.get("greedy", 0))
            if options.get("expert_pack"):
                found["expert_stats"] = llm.expert_stats().to_dict()
        finally:
            llm.close()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found["traceback"] = traceback.format_exc()
    (out / f"{job['id']}.json").write_text(json.dumps(found))


def main() -> None:
    out = Path(sys.argv[2])
    for job in json.loads(Path(sys.argv[1]).read_text()):
        print(job["id"], flush=True)  # the last line names the job of a crash
        run(job, out)


if __name__ == "__main__":
    main()
