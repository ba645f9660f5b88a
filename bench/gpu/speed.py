"""Speed straight through llama_decode: prefill and decode steps of one side, or of two models in turn in one process."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.stock import ROOT, environment, llama_class

_WARM_UP_ROUNDS = 12  # at most


class Stepper:
    """A loaded model; runs batches on an empty context and times them. Tokens are drawn by the caller."""

    def __init__(self, job: dict[str, Any], options: dict[str, Any]) -> None:
        llama = llama_class(job["stock"], repack=True)  # ours must be the first to import llama_cpp
        import llama_cpp

        self._cpp = llama_cpp
        start = time.perf_counter()
        self.llm = llama(
            job["model"],
            n_ctx=job.get("n_ctx", 4096),
            n_batch=2048,
            n_ubatch=job.get("n_ubatch", 2048),
            n_gpu_layers=-1,
            verbose=False,
            **options,
        )
        self.load_s = time.perf_counter() - start
        self.n_vocab = self.llm.n_vocab()
        self.packed = bool(options.get("expert_pack"))
        self._warm_up_rng = np.random.default_rng(2)  # so that the tokens that count are the same on every side
        self.digests: list[str] = []  # of the last logits of each prompt and of each run of steps

    def draw(self, rng: np.random.Generator, n: int) -> list[int]:
        """n random tokens."""
        return rng.integers(0, self.n_vocab, n).tolist()  # type: ignore[no-any-return]

    def _run(self, tokens: list[int], n_past: int) -> None:
        self.llm._batch.set_batch(batch=tokens, n_past=n_past, logits_all=False)
        self.llm._ctx.decode(self.llm._batch)
        self._cpp.llama_synchronize(self.llm._ctx.ctx)

    def _note_logits(self) -> None:
        logits = np.ctypeslib.as_array(self.llm._ctx.get_logits_ith(-1), shape=(self.n_vocab,))
        self.digests.append(hashlib.sha256(logits.tobytes()).hexdigest()[:16])

    def timed(self, prompt: list[int], steps: list[int]) -> tuple[float, float]:
        """Seconds for the prompt, and for the steps after it but the first four, by which captured graphs are ready."""
        self._cpp.llama_memory_clear(self._cpp.llama_get_memory(self.llm._ctx.ctx), True)
        start = time.perf_counter()
        self._run(prompt, 0)
        prefill_s = time.perf_counter() - start
        self._note_logits()
        for i, token in enumerate(steps[:4]):
            self._run([token], len(prompt) + i)
        start = time.perf_counter()
        for i, token in enumerate(steps[4:], 4):
            self._run([token], len(prompt) + i)
        decode_s = time.perf_counter() - start
        self._note_logits()
        return prefill_s, decode_s

    def loads(self) -> int:
        """Experts read so far."""
        return int(self.llm.expert_stats().loads) if self.packed else 0

    def warm_up(self, n_prompt: int, n_rounds: int) -> None:
        """Prompts and steps before anything counts."""
        for _ in range(n_rounds):
            self.timed(self.draw(self._warm_up_rng, n_prompt), self.draw(self._warm_up_rng, 20))
        self.digests.clear()

    def warm_up_until_resident(self, n_prompt: int) -> None:
        """Until three prompts in a row and the steps after them read no expert, so that no read counts."""
        for _ in range(_WARM_UP_ROUNDS):
            before = self.loads()
            self.warm_up(n_prompt, 3)
            if self.loads() == before:
                return


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Prefill and decode tokens/s of one side: medians of repeats."""
    stepper = Stepper(job, job["options"])
    if "n_warm_up" in job:
        stepper.warm_up(512, job["n_warm_up"])
    else:
        stepper.warm_up_until_resident(max(job["prompts"]))
    rng = np.random.default_rng(1)
    found: dict[str, Any] = {"load_s": stepper.load_s}
    before = stepper.llm.expert_stats() if stepper.packed else None
    for n_prompt in job["prompts"]:
        samples = [
            stepper.timed(stepper.draw(rng, n_prompt), stepper.draw(rng, job["n_steps"] + 4))
            for _ in range(job["n_repeats"])
        ]
        prefill_s, decode_s = np.median(np.array(samples), axis=0).tolist()
        found[f"prefill{n_prompt}_tokens_per_s"] = n_prompt / prefill_s
        found[f"decode_after{n_prompt}_tokens_per_s"] = job["n_steps"] / max(decode_s, 1e-9)
    if before is not None:
        found["expert_stats"] = stepper.llm.expert_stats().since(before).to_dict()
    found["logits_digests"] = stepper.digests
    stepper.llm.close()
    return found


def measure_in_turn(job: dict[str, Any]) -> dict[str, Any]:
    """The model without and with its pack, in turn with the same tokens: what differs between processes cancels out.

    Times are medians over the repeats; added_us is the median of the differences of each repeat.
    """
    plain, packed = Stepper(job, {}), Stepper(job, job["options"])
    for stepper in (plain, packed):
        stepper.warm_up_until_resident(max(job["prompts"]))
    rng = np.random.default_rng(1)
    loads = packed.loads()
    found: dict[str, Any] = {}
    for n_prompt in job["prompts"]:
        times = np.empty((job["n_repeats"], 2, 2))  # us of plain and packed: the prompt, a step
        for repeat in range(job["n_repeats"]):
            prompt, steps = plain.draw(rng, n_prompt), plain.draw(rng, job["n_steps"] + 4)
            for i in (0, 1) if repeat % 2 else (1, 0):
                times[repeat, i] = 1e6 * np.array((plain, packed)[i].timed(prompt, steps))
        times[:, :, 1] /= job["n_steps"]
        for i, phase in enumerate((f"prefill{n_prompt}", f"step_after{n_prompt}")):
            without, with_pack = np.median(times[:, :, i], axis=0).tolist()
            found[f"{phase}_us"] = {"no-pack": without, "packed": with_pack}
            found[f"{phase}_added_us"] = float(np.median(times[:, 1, i] - times[:, 0, i]))
            found[f"{phase}_ratio"] = without / with_pack
    found["loads"] = packed.loads() - loads
    found["same_logits"] = plain.digests == packed.digests
    for stepper in (plain, packed):
        stepper.llm.close()
    return found


def in_process(job: dict[str, Any], what: str = "measure") -> dict[str, Any]:
    """Runs measure or measure_in_turn in a process of its own, with the libraries of the job's side."""
    run = subprocess.run(
        [sys.executable, "-m", "bench.gpu.speed", what, json.dumps(job)],
        env=environment(job["stock"]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        return {"error": f"exit status {run.returncode}: {(run.stderr or run.stdout)[-600:]}"}
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main(arguments: Sequence[str]) -> None:
    what, job = arguments
    found = {"measure": measure, "measure_in_turn": measure_in_turn}[what](json.loads(job))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
