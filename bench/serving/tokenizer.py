"""A tokenizer of a few hundred tokens, cut out of llama's: what upstream's small story models have."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from lab.synth.gguf_out import I32, Typed

N_CONTROL_AND_BYTES = 259
# the first merges that llama's tokenizer learned; with so many, upstream's test prompts fit their contexts
N_MERGES = 75
FIM = ("prefix", "suffix", "middle")
NORMAL, CONTROL = 1, 3


@cache
def small_tokenizer(vocabulary: Path) -> dict[str, Any]:
    """GGUF metadata of a tokenizer with the control tokens, bytes, first merges and ASCII of `vocabulary`."""
    fields = GGUFReader(vocabulary).fields
    tokens, scores, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type"))
    first = N_CONTROL_AND_BYTES + N_MERGES
    letters = [
        i for i in range(first, len(tokens)) if len(tokens[i]) == 1 and (tokens[i].isascii() or tokens[i] == "▁")
    ]
    kept = [*range(first), *letters]
    n = len(kept)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [tokens[i] for i in kept] + [f"<fim_{part}>" for part in FIM],
        "tokenizer.ggml.scores": [float(scores[i]) for i in kept] + [0.0] * len(FIM),
        "tokenizer.ggml.token_type": [Typed(I32, int(types[i])) for i in kept] + [Typed(I32, CONTROL)] * len(FIM),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.fim_pre_token_id": n,
        "tokenizer.ggml.fim_suf_token_id": n + 1,
        "tokenizer.ggml.fim_mid_token_id": n + 2,
    }
