"""What people call: completion, chat, embeddings, saved states and adapters give what stock gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from lab.logits import differences, minimum_budget, run_jobs
from lab.synth.gguf_out import I32, Typed, write_gguf
from lab.synth.model import write_model
from lab.synth.shape import Tensor
from lab.variants import NARROW
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from tests.runtime.packed import bits, evaluate, loaded, tokens_at, variant

N_VOCAB = 3 + 256


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer that has a token for each byte."""
    folder = tmp_path_factory.mktemp("speaker")
    unknown, control, byte = 2, 3, 6
    tokenizer = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        "tokenizer.ggml.scores": [0.0] * N_VOCAB,
        "tokenizer.ggml.token_type": [Typed(I32, kind) for kind in (unknown, control, control, *[byte] * 256)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    write_gguf(folder / "vocab.gguf", tokenizer, [])
    path = write_model(folder / "speaker.gguf", replace(NARROW, n_vocab=N_VOCAB), tokenizer=folder / "vocab.gguf")
    convert(path)
    return path


@pytest.fixture
def pair(speaker: Path) -> Iterator[tuple[Any, Any]]:
    """The same model without and with a pack, with the least cache."""
    least = minimum_budget(open_pack(find_pack(speaker)))
    with loaded(speaker, expert_pack=None) as stock, loaded(speaker, expert_cache=least) as ours:
        yield stock, ours


def same(pair: tuple[Any, Any], call: Any) -> Any:
    """What both answer, without what differs from call to call."""
    answers = [call(llm) for llm in pair]
    for answer in answers:
        for varying in ("id", "created") if isinstance(answer, dict) else ():
            answer.pop(varying)
    assert answers[0] == answers[1]
    return answers[0]


def test_text_becomes_tokens_and_text_again(pair: tuple[Any, Any]) -> None:
    text = "héllo\n".encode()
    tokens = same(pair, lambda llm: llm.tokenize(text, add_bos=False))
    assert text in same(pair, lambda llm: llm.detokenize(tokens))


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_completion(pair: tuple[Any, Any], temperature: float) -> None:
    options = {"max_tokens": 24, "temperature": temperature, "seed": 7, "logprobs": 3}
    answer = same(pair, lambda llm: llm.create_completion("Once upon", **options))
    assert answer["usage"]["completion_tokens"] > 0
    same(pair, lambda llm: llm("Once upon a", max_tokens=4, echo=True, stop=["\0"]))
    assert pair[1].expert_stats().evictions > 0


def test_completion_in_pieces(pair: tuple[Any, Any]) -> None:
    def call(llm: Any) -> list[str]:
        pieces = llm.create_completion("Once upon", max_tokens=16, temperature=0, stream=True)
        return [piece["choices"][0]["text"] for piece in pieces]

    assert len(same(pair, call)) > 1


def test_a_stream_that_is_left_early(pair: tuple[Any, Any]) -> None:
    def call(llm: Any) -> str:
        stream = llm.create_completion("Once upon", max_tokens=16, temperature=0, stream=True)
        next(stream)
        stream.close()
        text: str = llm.create_completion("Once again", max_tokens=8, temperature=0)["choices"][0]["text"]
        return text

    same(pair, call)


def test_chat(pair: tuple[Any, Any]) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}]
    for options in ({}, {"response_format": {"type": "json_object"}}):
        answer = same(
            pair,
            lambda llm: llm.create_chat_completion(messages, max_tokens=12, temperature=0, **options),  # noqa: B023
        )
        assert answer["choices"][0]["message"]["role"] == "assistant"


def test_a_draft_model(speaker: Path) -> None:
    """Several tokens are evaluated at once, and some of them taken back."""
    least = minimum_budget(open_pack(find_pack(speaker)))
    texts = []
    for options in ({"expert_pack": None}, {"expert_cache": least}):
        with loaded(speaker, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4), **options) as llm:
            texts.append(llm.create_completion("ababab", max_tokens=24, temperature=0)["choices"][0]["text"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("pooling_type", [0, 1, 2])
def test_embeddings(pooling_type: int, speaker: Path) -> None:
    least = minimum_budget(open_pack(find_pack(speaker)))
    found = []
    for options in ({"expert_pack": None}, {"expert_cache": least}):
        with loaded(speaker, embedding=True, logits_all=False, pooling_type=pooling_type, **options) as llm:
            found.append((llm.embed(["one", "two and more"]), llm.create_embedding("three")["data"][0]["embedding"]))
    assert found[0] == found[1]


def test_logits_of_the_last_token_are_those_of_all(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    with loaded(path) as llm:
        evaluate(llm, [30, 1])
        expected = llm.scores[llm.n_tokens - 1].copy()
    with loaded(path, logits_all=False) as llm:
        llm.eval(tokens_at(0, 30))
        llm.eval(tokens_at(30, 1))
        assert (np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)) == expected).all()


def test_a_state_can_be_saved_and_loaded(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    least = minimum_budget(open_pack(find_pack(path)))
    with loaded(path, expert_cache=least) as llm:
        expected = evaluate(llm, [20, 1, 5])
    with loaded(path, expert_cache=least) as llm:
        evaluate(llm, [20, 1])
        state = llm.save_state()
        evaluate(llm, [9])
        llm.load_state(state)
        assert llm.n_tokens == 21
        llm.eval(tokens_at(21, 5))
        assert (bits(llm) == expected).all()
    with loaded(path, expert_cache=least) as other:  # the state outlives its model
        other.load_state(state)
        other.eval(tokens_at(21, 5))
        assert (bits(other)[21:] == expected[21:]).all()


# ---- adapters

LORA_KV = {
    "general.type": "adapter",
    "general.architecture": "qwen3moe",
    "adapter.type": "lora",
    "adapter.lora.alpha": 8.0,
}
RANK = 4


def pair_of(name: str, n_in: int, n_out: int, n_expert: int | None = None) -> list[Tensor]:
    more = () if n_expert is None else (n_expert,)
    return [
        Tensor(f"{name}.lora_a", (n_in, RANK, *more), gain=4.0),
        Tensor(f"{name}.lora_b", (RANK, n_out, *more), gain=4.0),
    ]


N = NARROW
ADAPTERS = {
    "attention": pair_of("blk.0.attn_q.weight", N.n_embd, N.n_head * N.head_dim),
    "router": pair_of("blk.1.ffn_gate_inp.weight", N.n_embd, N.n_expert),
    "expert-up": pair_of("blk.1.ffn_up_exps.weight", N.n_embd, 64, N.n_expert),
    "all-experts": [
        tensor
        for layer in range(2)
        for role, sizes in (("gate", (N.n_embd, 64)), ("up", (N.n_embd, 64)), ("down", (64, N.n_embd)))
        for tensor in pair_of(f"blk.{layer}.ffn_{role}_exps.weight", *sizes, N.n_expert)
    ],
}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lora")
    path = write_model(folder / "model.gguf", NARROW)
    convert(path)
    common = {"model": str(path), "batches": [33, 1, 1, 5, 1]}
    packed = {
        "expert_pack": True,
        "expert_cache_reserve": 0,
        "expert_cache": minimum_budget(open_pack(find_pack(path))),
    }
    jobs = [{"id": "none.stock", "stock": True, "llama": {}, **common}]
    for name, tensors in ADAPTERS.items():
        options = {"lora_path": str(write_gguf(folder / f"{name}.gguf", LORA_KV, tensors)), "lora_scale": 0.7}
        jobs.append({"id": f"{name}.stock", "stock": True, "llama": options, **common})
        jobs.append({"id": f"{name}.ours", "stock": False, "llama": {**options, **packed}, **common})
    return run_jobs(jobs, folder / "logits")


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_apply_to_packed_models(name: str, adapted: dict[str, Any]) -> None:
    assert differences(adapted[f"{name}.stock"], adapted[f"{name}.ours"]) == ""
    assert differences(adapted["none.stock"], adapted[f"{name}.ours"]) != "", "the adapter does nothing"
