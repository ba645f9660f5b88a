"""One side of a comparison, in a process of its own: loads a model, evaluates prompts, generates, and counts.

Started by bench.compare with a job as JSON; writes what it found to the job's `out`.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from lab.stock import STOCK_LIB, llama_class
from llama_expert_pack.pypack.errors import ExpertPackError

# what llama.cpp's --cpu-moe overrides, and --n-cpu-moe after the number of a block
EXPERT_TENSORS = rb"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
WARM_STEPS = 4  # steps before the clock starts: CUDA graphs are captured after these


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override, which llama-cpp-python does not declare."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def _patterns(cpu_layers: int) -> list[bytes]:
    return [EXPERT_TENSORS] if cpu_layers < 0 else [rb"blk\.%d" % i + EXPERT_TENSORS for i in range(cpu_layers)]


def _stock_class(cpu_layers: int, direct_io: bool) -> Any:
    """llama_cpp.Llama with the options of llama.cpp that its constructor has no keywords for."""
    import llama_cpp

    class Stock(llama_cpp.Llama):  # type: ignore[name-defined, misc, unused-ignore]
        """--cpu-moe, --n-cpu-moe, --load-mode dio; with mmap --no-repack: copies of weights would not fit under a cap."""

        @property
        def model_params(self) -> Any:
            if direct_io:  # the constructor sets another mode first, and reads the parameters last
                self._model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_DIRECT_IO
            return self._model_params

        @model_params.setter
        def model_params(self, params: Any) -> None:
            params.use_extra_bufts = direct_io
            if cpu_layers:
                buffer_type = ctypes.CDLL(str(STOCK_LIB / "libggml-base.so")).ggml_backend_cpu_buffer_type
                buffer_type.restype = ctypes.c_void_p
                overrides = [_Override(pattern, buffer_type()) for pattern in _patterns(cpu_layers)]
                self._overrides = (_Override * (len(overrides) + 1))(*overrides)  # the last one ends them
                params.tensor_buft_overrides = ctypes.addressof(self._overrides)
            self._model_params = params

    return Stock


def draw_tokens(n: int, n_vocab: int, skew: float, seed: int) -> list[int]:
    """Token ids by Zipf's law, as words are in a text: the token of rank r with weight 1 / (r + 10) ** skew."""
    order = np.random.default_rng(0).permutation(n_vocab)  # which token has which rank: the same for all seeds
    weights = 1.0 / (np.arange(n_vocab) + 10.0) ** skew
    ranks = np.random.default_rng(seed).choice(n_vocab, n, p=weights / weights.sum())
    return [int(token) for token in order[ranks]]


def io_read_bytes() -> int:
    """Bytes that this process has fetched from drives, page faults of a mapping included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


class Side:
    """A loaded model and the counters around it."""

    def __init__(self, job: dict[str, Any]) -> None:
        llama = _stock_class(job["cpu_layers"], job["direct_io"]) if job["stock"] else llama_class(stock=False)
        import llama_cpp  # ours must be the first to import it

        self.lib = llama_cpp
        options = {"n_gpu_layers": job["gpu_layers"] if job["gpu"] else 0, "n_threads": job["n_threads"]}
        options["n_threads_batch"] = job["n_threads"]
        if job["n_ubatch"] is not None:  # else ours chooses
            options |= {"n_batch": job["n_ubatch"], "n_ubatch": job["n_ubatch"]}
        self.llm = llama(job["model"], n_ctx=job["n_ctx"], verbose=False, **options, **job["options"])
        self.packed = not job["stock"]
        self.n_batch = self.llm.n_batch
        self.n_past = 0

    def clear(self) -> None:
        """Forgets all tokens."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.llm._ctx.ctx), True)
        self.n_past = 0

    def decode(self, tokens: list[int]) -> int:
        """Evaluates tokens after the earlier ones; the most likely next token."""
        for start in range(0, len(tokens), self.n_batch):
            part = tokens[start : start + self.n_batch]
            self.llm._batch.set_batch(batch=part, n_past=self.n_past, logits_all=False)
            self.llm._ctx.decode(self.llm._batch)
            self.n_past += len(part)
        logits = self.lib.llama_get_logits_ith(self.llm._ctx.ctx, -1)  # waits for the computation
        return int(np.ctypeslib.as_array(logits, (self.llm.n_vocab(),)).argmax())

    def counted(self) -> tuple[float, float, int, Any]:
        """(monotonic s, time of day s, bytes from drives, :class:`ExpertStats` or None), for :meth:`phase`."""
        return (
            time.perf_counter(),
            time.time(),
            io_read_bytes(),
            self.llm.expert_stats() if self.packed else None,
        )

    def phase(self, before: Any, n_tokens: int) -> dict[str, Any]:
        """What happened since `before`: seconds, tokens/s, bytes from the drive, the cache's counters."""
        after = self.counted()
        duration_s = after[0] - before[0]
        found = {
            "s": duration_s,
            "n_tokens": n_tokens,
            "tokens_per_s": n_tokens / duration_s,
            "window": [before[1], after[1]],
        }
        if after[3] is None:
            return {**found, "read_bytes": after[2] - before[2]}
        stats = after[3].since(before[3])
        return {
            **found,
            "read_bytes": stats.read_bytes,
            "io_read_bytes": after[2] - before[2],
            "stats": stats.to_dict(),
        }


def run_prompt(side: Side, prompt: list[int], steps: list[int] | None, n_gen: int) -> dict[str, Any]:
    """Prefill, then decode the given tokens, or greedily those that the model chooses."""
    side.clear()
    before = side.counted()
    chosen = [side.decode(prompt)]
    prefill = side.phase(before, len(prompt))
    for i in range(WARM_STEPS + n_gen):
        if i == WARM_STEPS:
            before = side.counted()
        chosen.append(side.decode([chosen[-1] if steps is None else steps[i]]))
    return {"prefill": prefill, "decode": side.phase(before, n_gen), "chosen": chosen}


def decode_on(side: Side, steps: list[int]) -> dict[str, Any]:
    """More tokens after the last ones: a prompt before them is farther away."""
    before = side.counted()
    for token in steps:
        side.decode([token])
    return side.phase(before, len(steps))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Loads the job's model and runs its prompts; seconds, bytes and samples as bench/compare/results.py reads them."""
    read_before, start = io_read_bytes(), time.perf_counter()
    side = Side(job)
    found: dict[str, Any] = {"load_s": time.perf_counter() - start, "load_read_bytes": io_read_bytes() - read_before}
    n_vocab, n_gen, skew = side.llm.n_vocab(), job["n_gen"], job["token_skew"]
    side.decode([0])  # starts the libraries; touches a few experts only
    prompts: list[tuple[list[int], list[int] | None]]
    if job["prompts"]:
        prompts = [(side.llm.tokenize(text.encode()), None) for text in job["prompts"]]
    else:
        prompts = [
            (
                draw_tokens(job["n_prompt"], n_vocab, skew, 100 + i),
                draw_tokens(WARM_STEPS + n_gen, n_vocab, skew, 200 + i),
            )
            for i in range(job["n_repeats"])
        ]
    if job["n_warm"]:
        warm = [
            (
                draw_tokens(job["n_prompt"], n_vocab, skew, 300 + i),
                draw_tokens(WARM_STEPS + n_gen, n_vocab, skew, 400 + i),
            )
            for i in range(job["n_warm"])
        ]
        found["cold"], *_ = [run_prompt(side, prompt, steps, n_gen) for prompt, steps in warm]
        found["settled"] = decode_on(side, draw_tokens(n_gen, n_vocab, skew, 500))
    found["n_ubatch"] = side.llm.context_params.n_ubatch
    found["samples"] = [run_prompt(side, prompt, steps, n_gen) for prompt, steps in prompts]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found["rss_peak_bytes"] = int(status["VmHWM"].split()[0]) * 1024  # ru_maxrss is at least that of the parent
    found["rss_anonymous_bytes"] = int(status["RssAnon"].split()[0]) * 1024
    side.llm.close()
    return found


def main() -> None:
    job = json.loads(sys.argv[1])
    try:
        Path(job["out"]).write_text(json.dumps(measure(job)))
    except ExpertPackError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
