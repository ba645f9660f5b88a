"""A byte-level BPE tokenizer as GPT-2's, which llama.cpp reads as tokenizer.ggml.model "gpt2", pre "gpt-2"."""

from __future__ import annotations

import json
from typing import Any

BOUNDARY = "<|text|>"  # id 0: begins every text and ends it

# what a test tokenizes with llama.cpp: words, numbers, spaces and bytes that the text has and has not
SAMPLES = (
    "Emma Woodhouse, handsome, clever, and rich",
    "In the beginning, God created the heavens and the earth.",
    "He said to them, \"Don't be afraid;   I'll go with you.\"",
    "She'd 12,345 reasons (or 7?) -- none they've heard of!",
    "  two leading spaces, a tab\tand\n\nempty lines \n at the end  \n",
    "naïve café, £5, 漢字, мир, 🙂 and \\ ~ {} []",
    "UPPER lower MiXeD x1y2z3 a_b-c.d",
    "",
    " ",
    "\n",
)


def train(text: str, n_vocab: int) -> Any:
    """A `tokenizers.Tokenizer` of exactly `n_vocab` tokens; ValueError if the text gives fewer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=[BOUNDARY],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    if tokenizer.get_vocab_size() != n_vocab:
        raise ValueError(f"the text gives {tokenizer.get_vocab_size()} tokens, expected {n_vocab}: give more text")
    return tokenizer


def vocabulary(tokenizer: Any) -> tuple[list[str], list[str]]:
    """Tokens by id, and merges as "left right", in GPT-2's spelling of bytes as letters."""
    described = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["merges"]]
    return tokens, merges
