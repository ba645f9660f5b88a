from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.make_model import make_model
from lab.stock import STOCK_LIB
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.gguf.model import read_model
from llama_expert_pack.pypack.source.discover import find_layers
from tests.server.serving import STOCK, Server, faulty, serving

VOCABULARY = STOCK_LIB.parent / "source" / "models" / "ggml-vocab-llama-spm.gguf"
SIZES: dict[str, Any] = {"n_layer": 4, "n_embd": 256, "n_head": 2, "n_ff_exp": 256, "n_expert": 16, "n_expert_used": 2}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a.gguf and b.gguf, each with its pack, and draft.gguf without."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b", "draft"), 1):
        make_model(folder / f"{name}.gguf", "demo", seed=seed, tokenizer=VOCABULARY, **SIZES)
    convert(folder / "a.gguf")
    convert(folder / "b.gguf")
    return folder


@pytest.fixture(scope="session")
def model(models: Path) -> Path:
    return models / "a.gguf"


@pytest.fixture(scope="session")
def quarter(model: Path) -> list[str]:
    """Flags for a quarter of the experts."""
    layers = find_layers(read_model(model))
    n_bytes = sum(layer.n_expert * layer.block_bytes for layer in layers) // 4
    return ["--expert-pack", "auto", "--expert-cache", str(n_bytes), "--expert-cache-reserve", "0"]


@pytest.fixture(scope="session")
def stock_server() -> list[str]:
    assert Path(STOCK[0]).exists(), f"{STOCK[0]} is not built: run `make stock`"
    return STOCK


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path, quarter: list[str]) -> Iterator[Server]:
    """A server for tests that only ask: what it holds in its caches comes from other tests."""
    folder = tmp_path_factory.mktemp("packed")
    with serving(folder, model, *quarter, "--metrics", "--alias", "packed") as server:
        yield server


@dataclass
class Breaking:
    """A server whose disk does what `fault` says, see faulty_server.py."""

    server: Server
    fault: Path


@pytest.fixture(scope="session")
def shared_breaking(tmp_path_factory: pytest.TempPathFactory, model: Path, quarter: list[str]) -> Iterator[Breaking]:
    folder = tmp_path_factory.mktemp("breaking")
    fault = folder / "fault"
    with serving(folder, model, *quarter, "--metrics", program=faulty(fault)) as server:
        yield Breaking(server, fault)


@pytest.fixture
def breaking(shared_breaking: Breaking) -> Iterator[Breaking]:
    """Its disk is whole before and after each test."""
    yield shared_breaking
    shared_breaking.fault.write_text("")
