"""Texts at temperature 0 are stock's, whatever the server is asked to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lab.synth.gguf_out import write_gguf
from lab.synth.shape import Tensor
from llama_expert_pack.pypack.gguf.model import read_model
from llama_expert_pack.pypack.source.discover import find_layers
from llama_expert_pack.pypack.source.samples import _samples
from tests.server.serving import OURS, Server, serving

PROMPTS = ("Once upon a time", "The quick brown fox jumps over", "x " * 150)
MODES = ("none", "mmap", "mlock", "mmap+mlock", "dio")
NO_REPACK = ["--no-repack"]  # with a pack, ours never repacks


def answers(server: Server) -> list[Any]:
    """Texts of completions, alone and several at once in a chat, that start from an empty cache."""
    chat = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 16, "temperature": 0}
    status, reply = server.call("/v1/chat/completions", chat)
    assert status == 200, reply
    return [server.text(prompt, cache_prompt=False) for prompt in PROMPTS] + [
        reply["choices"][0]["message"].get("content"),
        server.get("/slots")[0]["n_ctx"],
    ]


def of(folder: Path, model: Path, *flags: str, program: list[str] = OURS) -> list[Any]:
    with serving(folder, model, *flags, program=program) as server:
        found = answers(server)
        assert any(found)
        return found


@pytest.fixture(scope="module")
def packed_answers(tmp_path_factory: pytest.TempPathFactory, model: Path, quarter: list[str]) -> list[Any]:
    return of(tmp_path_factory.mktemp("packed"), model, *quarter)


def test_texts(tmp_path: Path, model: Path, packed_answers: list[Any], stock_server: list[str]) -> None:
    stock = of(tmp_path, model, *NO_REPACK, program=stock_server)
    assert of(tmp_path, model, *NO_REPACK) == stock
    assert packed_answers == stock


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The model with garbage (NaN in every scale) in place of its experts, and its pack.

    Garbage in those four of a layer that are compared with the pack would be found.
    """
    folder = tmp_path_factory.mktemp("hollow")
    path = Path(shutil.copy(model, folder))
    for suffix in (".expert-pack", ".expert-pack.manifest.json"):
        shutil.copy(model.with_suffix(suffix), folder)
    found = read_model(path)
    with path.open("r+b") as file:
        for layer in find_layers(found):
            for role in layer.roles:
                compared = {expert for expert, _, _ in _samples(layer.n_expert, role.bytes)}
                for expert in set(range(layer.n_expert)) - compared:
                    file.seek(found.tensors[role.tensor].offset + expert * role.bytes)
                    file.write(b"\xff" * role.bytes)
    return path


@pytest.mark.parametrize("flags", [[], *([["--load-mode", mode] for mode in MODES]), ["--check-tensors"]], ids=" ".join)
def test_the_models_own_experts_are_not_read(
    tmp_path: Path, hollow: Path, packed_answers: list[Any], quarter: list[str], flags: list[str]
) -> None:
    with serving(tmp_path, hollow, *quarter, *flags) as server:
        assert server.text(PROMPTS[0], cache_prompt=False) == packed_answers[0]


def test_draft_model(tmp_path: Path, models: Path, quarter: list[str], stock_server: list[str]) -> None:
    draft = ["-md", str(models / "draft.gguf"), "--spec-type", "draft-simple"]
    stock = of(tmp_path, models / "a.gguf", *NO_REPACK, *draft, program=stock_server)
    assert of(tmp_path, models / "a.gguf", *quarter, *draft) == stock


def test_model_is_its_own_draft(tmp_path: Path, model: Path, quarter: list[str], stock_server: list[str]) -> None:
    draft = ["-md", str(model), "--spec-type", "draft-simple"]
    stock = of(tmp_path, model, *NO_REPACK, *draft, program=stock_server)
    with serving(tmp_path, model, *quarter, *draft) as server:
        assert answers(server) == stock
        assert server.complete("Once upon a time")[1]["timings"]["draft_n_accepted"] > 0


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter for an attention weight and an expert weight."""
    kv = {
        "general.architecture": "qwen3moe",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }
    shapes = {"blk.0.attn_k": (256, 256, ()), "blk.1.ffn_up_exps": (256, 256, (16,))}
    tensors = []
    for name, (n_in, n_out, more) in shapes.items():
        tensors.append(Tensor(f"{name}.weight.lora_a", (n_in, 4, *more), gain=4.0))
        tensors.append(Tensor(f"{name}.weight.lora_b", (4, n_out, *more), gain=4.0))
    return write_gguf(tmp_path_factory.mktemp("lora") / "adapter.gguf", kv, tensors)


def test_lora(
    tmp_path: Path,
    model: Path,
    quarter: list[str],
    packed_answers: list[Any],
    adapter: Path,
    stock_server: list[str],
) -> None:
    lora = ["--lora", str(adapter)]
    stock = of(tmp_path, model, *NO_REPACK, *lora, program=stock_server)
    assert of(tmp_path, model, *quarter, *lora) == stock
    assert stock != packed_answers


def test_embeddings(tmp_path: Path, model: Path, quarter: list[str], stock_server: list[str]) -> None:
    def vectors(*flags: str, program: list[str] = OURS) -> Any:
        with serving(tmp_path, model, "--embeddings", "--pooling", "mean", *flags, program=program) as server:
            status, reply = server.call("/v1/embeddings", {"input": list(PROMPTS)})
            assert status == 200, reply
            return [item["embedding"] for item in reply["data"]]

    stock = vectors(*NO_REPACK, program=stock_server)
    assert len(stock) == len(PROMPTS) and len(stock[0]) == 256
    assert vectors(*quarter) == stock
