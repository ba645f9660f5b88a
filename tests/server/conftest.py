from __future__ import annotations

from pathlib import Path

import pytest

from bench.make_model import make_model
from bench.stock import STOCK_LIB
from pypack.convert import convert
from pypack.discover import find_layers
from pypack.gguf_source import read_model
from tests.server.serving import STOCK

VOCABULARY = STOCK_LIB.parent / "source" / "models" / "ggml-vocab-llama-spm.gguf"
SIZES = {"n_layer": 4, "n_embd": 256, "n_head": 2, "n_ff_exp": 256, "n_expert": 16, "n_expert_used": 2}


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
