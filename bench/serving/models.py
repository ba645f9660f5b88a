"""The models that upstream's server tests ask for by their Hugging Face names, made here, in a cache laid out as llama.cpp's.

Every one has experts, and a pack beside it, except the reranker and the draft model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.serving.tokenizer import small_tokenizer
from lab.synth.gguf_out import read_kv, tokenizer_size, write_gguf
from lab.synth.model import metadata, tensors
from lab.synth.shape import Shape
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.format.pack import open_pack

REVISION = "0" * 40
# repository, file in it; tests ask for some by the type in the name, which is not theirs here: all are F16
STORIES = (
    ("ggml-org/test-model-stories260K", "stories260K-f32.gguf"),
    ("ggml-org/test-model-stories260K-infill", "stories260K-infill-f32.gguf"),
    ("ggml-org/stories15M_MOE", "stories15M_MOE-F16.gguf"),
    ("ggml-org/tinygemma3-GGUF", "tinygemma3-Q8_0.gguf"),
)
EMBEDDING = ("ggml-org/models", "bert-bge-small/ggml-model-f16.gguf")
RERANKER = ("ggml-org/models", "jina-reranker-v1-tiny-en/ggml-model-f16.gguf")
DRAFT = "stories15M-q4_0.gguf"

STORY_SHAPE = Shape(
    arch="llama",
    n_layer=4,
    n_embd=64,
    n_head=4,
    n_head_kv=4,
    head_dim=16,
    n_ff=128,
    n_ff_exp=128,
    n_expert=16,
    n_expert_used=2,
    n_ctx=2048,
)
# the experts weigh about as much as the story model's: one budget is a quarter of either
EMBEDDING_SHAPE = replace(
    STORY_SHAPE,
    arch="nomic-bert-moe",
    n_ff=384,
    n_ff_exp=384,
    n_ctx=512,
    dense_layers=(0, 2),
    expert_types={"up": ("F16",), "down": ("F16",)},
)
RERANKER_SHAPE = replace(
    STORY_SHAPE,
    arch="bert",
    n_layer=2,
    n_expert=0,
    n_expert_used=0,
    n_ctx=512,
    dense_layers=(0, 1),
)
DRAFT_SHAPE = replace(STORY_SHAPE, n_layer=1, n_expert=0, n_expert_used=0, dense_layers=(0,))


def _place(cache: Path, repository: str, file: str) -> Path:
    folder = cache / f"models--{repository.replace('/', '--')}"
    path = folder / "snapshots" / REVISION / file
    path.parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(REVISION)
    return path


def write_story_model(path: Path, vocabulary: Path, shape: Shape = STORY_SHAPE) -> Path:
    """A model of `shape` with the small tokenizer, cut out of the GGUF `vocabulary`."""
    tokenizer = small_tokenizer(vocabulary)
    shape = replace(shape, n_vocab=len(tokenizer["tokenizer.ggml.tokens"]))
    return write_gguf(path, metadata(shape) | tokenizer, tensors(shape))


def _write_encoder(path: Path, vocabulary: Path, shape: Shape) -> Path:
    raw = read_kv(vocabulary, "tokenizer.")
    shape = replace(shape, n_vocab=tokenizer_size(raw))
    return write_gguf(path, metadata(shape), tensors(shape), raw_kv=raw)


def write_models(cache: Path, downloads: Path, source: Path) -> int:
    """Fills llama.cpp's model cache and the tests' own downloads; returns a quarter of the smallest pack, in bytes.

    `source` is llama.cpp's source, whose models/ has the vocabularies.
    """
    spm, bert = (source / "models" / f"ggml-vocab-{name}.gguf" for name in ("llama-spm", "bert-bge"))
    packed = [write_story_model(_place(cache, *name), spm) for name in STORIES]
    packed.append(_write_encoder(_place(cache, *EMBEDDING), bert, EMBEDDING_SHAPE))
    _write_encoder(_place(cache, *RERANKER), bert, RERANKER_SHAPE)
    downloads.mkdir(parents=True, exist_ok=True)
    write_story_model(downloads / DRAFT, spm, DRAFT_SHAPE)
    return min(open_pack(convert(path).path).payload_bytes for path in packed) // 4
