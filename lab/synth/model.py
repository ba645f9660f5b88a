"""From sizes to a model file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.synth import bert, deepseek4, gqa, kimi_k3, llama, nemotron
from lab.synth.gguf_out import read_kv, write_gguf
from lab.synth.shape import Shape, Tensor, common_kv
from lab.synth.shape import ends as decoder_ends


def _nothing(shape: Shape) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """``layer``: tensors of one block; ``kv``: metadata of this architecture alone, keys without its name; ``ends``:
    tensors before and behind the blocks. llama.cpp's src/models says what it loads."""

    layer: Callable[[Shape, int], Iterator[Tensor]]
    kv: Callable[[Shape], dict[str, Any]] = _nothing
    ends: Callable[[Shape], Iterator[Tensor]] = decoder_ends


ARCHITECTURES = {
    "llama": Architecture(llama.llama, ends=llama.llama_ends),
    "nomic-bert-moe": Architecture(bert.bert, bert.nomic_bert_moe_kv, bert.bert_ends),
    "bert": Architecture(bert.bert, bert.rank_kv, bert.rank_ends),
    "qwen3moe": Architecture(gqa.qwen3moe),
    "grovemoe": Architecture(gqa.grovemoe, gqa.grovemoe_kv),
    "glm4moe": Architecture(gqa.glm4moe, gqa.glm4moe_kv),
    "gpt-oss": Architecture(gqa.gpt_oss, gqa.gpt_oss_kv),
    "llama4": Architecture(gqa.llama4, gqa.llama4_kv),
    "hy_v3": Architecture(gqa.hy_v3, gqa.hy_v3_kv),
    "nemotron_h_moe": Architecture(nemotron.nemotron, nemotron.nemotron_kv),
    "deepseek4": Architecture(deepseek4.deepseek4, deepseek4.deepseek4_kv, deepseek4.deepseek4_ends),
    "kimi-k3": Architecture(kimi_k3.kimi_k3, kimi_k3.kimi_k3_kv, kimi_k3.kimi_k3_ends),
}


def tensors(shape: Shape) -> list[Tensor]:
    """Every tensor of the model, in the order of the file."""
    arch = ARCHITECTURES[shape.arch]
    layers = (tensor for layer in range(shape.n_layer) for tensor in arch.layer(shape, layer))
    return [*arch.ends(shape), *layers]


def metadata(shape: Shape) -> dict[str, Any]:
    """All metadata of the model but its tokenizer's, by full key."""
    values = common_kv(shape) | ARCHITECTURES[shape.arch].kv(shape)
    named = {f"{shape.arch}.{key}": value for key, value in values.items()}
    return {"general.architecture": shape.arch, "general.name": f"synthetic {shape.arch}", **named}


def numbered_tokenizer(n_vocab: int) -> dict[str, Any]:
    """llama.cpp's own tokenizer for tests: any text has tokens, and tokens print as their number."""
    return {
        "tokenizer.ggml.model": "test",
        "tokenizer.ggml.tokens": [f"tok_{i}" for i in range(n_vocab)],
        "tokenizer.ggml.scores": [0.0] * n_vocab,
    }


def write_model(
    path: Path, shape: Shape, *, seed: int = 1, n_shards: int = 1, tokenizer: Path | None = None, jobs: int = 1
) -> Path:
    """Writes the model to `path` and returns its first file.

    `tokenizer` is a GGUF whose tokenizer is copied; its size must be shape.n_vocab. The same arguments give
    the same bytes.
    """
    values, raw = metadata(shape), []
    if tokenizer is None:
        values |= numbered_tokenizer(shape.n_vocab)
    else:
        raw = read_kv(tokenizer, "tokenizer.")
    return write_gguf(path, values, tensors(shape), seed=seed, raw_kv=raw, n_shards=n_shards, jobs=jobs)
