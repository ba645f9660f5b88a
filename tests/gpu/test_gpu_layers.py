"""Layers spread over two GPUs: each has a cache of its own.

GGML_CUDA_DEVICES=2 makes two devices of one GPU, in which all but copies between GPUs can be tried.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lab.identity import compare
from lab.logits import differences, minimum_budget
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from tests.books import wrong_books
from tests.runtime.packed import evaluate, loaded, variant

ON_BOTH = {"tensor_split": [1, 3]}  # by halves, models of two layers would have both on the first


def n_gpus() -> int:
    if "GGML_CUDA_DEVICES" in os.environ:
        return int(os.environ["GGML_CUDA_DEVICES"])
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.count("GPU ")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed if visible is None else len(visible.split(","))


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if n_gpus() < 2:
        pytest.skip("there is one GPU")


def test_each_gpu_has_a_cache_for_its_layers(tmp_path: Path) -> None:
    path = variant("many-experts", tmp_path)
    least = minimum_budget(open_pack(find_pack(path)))
    with loaded(path, n_gpu_layers=-1, expert_cache=least, expert_ram=0, **ON_BOTH) as llm:
        evaluate(llm, [40, 7, *[1] * 8])
        assert llm._provider is not None
        assert sorted(llm._provider.arena_bytes) == ["CUDA0", "CUDA1"]
        assert llm.expert_stats().evictions > 0
        assert wrong_books(llm._provider.cache) == []


@pytest.mark.parametrize("n_ubatch", [64, 16])  # 16: llama.cpp has several under way
@pytest.mark.parametrize("name", ["type-MXFP4", "type-Q4_K", "many-experts", "expert-biases", "mixed-between-layers"])
def test_logits_and_greedy_tokens_are_those_of_stock_on_both(name: str, n_ubatch: int, tmp_path: Path) -> None:
    for case, stock, ours in compare(
        {name: variant(name, tmp_path)}, tmp_path / "logits", n_ubatch=n_ubatch, **ON_BOTH
    ):
        assert differences(stock, ours) == "", case
        assert ours.stats["loads"] > 0 and ours.found["greedy"] == stock.found["greedy"]
