"""With a pack, and no size of batches given, Llama chooses one that memory allows."""

from __future__ import annotations

import ctypes
import pickle
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.logits import minimum_budget
from llama_expert_pack import Llama
from llama_expert_pack.bridge.batch_sizes import context_bytes
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from tests.runtime.packed import provider_of, tokens_at, variant

FEW: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}


def least(path: Path) -> dict[str, Any]:
    return {**FEW, "expert_pack": True, "expert_cache": minimum_budget(open_pack(find_pack(path)))}


def last_logits(llm: Llama, n_tokens: int) -> np.ndarray:
    llm.eval(tokens_at(0, n_tokens, llm.n_vocab()))
    return np.array(np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)))


@pytest.mark.parametrize("n_ubatch", [512, 2048])
def test_what_a_context_would_take_is_what_it_takes(
    n_ubatch: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = variant("many-experts", tmp_path)
    options = {**least(path), "n_ctx": 8192, "verbose": True}
    with closing(Llama(str(path), n_batch=n_ubatch, n_ubatch=n_ubatch, **options)) as llm:
        said = capfd.readouterr().err
        sizes = re.findall(r"CPU (?:KV|compute) buffer size = +([\d.]+) MiB", said)
        model = ctypes.cast(llm._model.model, ctypes.c_void_p).value or 0
        found = context_bytes(model, ctypes.addressof(llm.context_params), n_ubatch)
        assert len(sizes) == 2 and list(found) == ["CPU"]
        assert found["CPU"].taken / 2**20 == pytest.approx(sum(map(float, sizes)), abs=0.02)
        assert "buffer size" not in capfd.readouterr().err, "nobody hears of the trial"
        found = context_bytes(model, ctypes.addressof(llm.context_params), 4 * n_ubatch)
        assert found["CPU"].taken / 2**20 > 2 * sum(map(float, sizes)), "larger ones take more"
        last_logits(llm, 100)  # and the model computes on


def test_neither_given_it_is_the_context_or_1024_on_the_cpu(tmp_path: Path) -> None:
    path = variant("many-experts", tmp_path)
    for n_ctx, n_batch in {300: 300, 900: 900, 20000: 1024, 0: 256}.items():
        with closing(Llama(str(path), n_ctx=n_ctx, **least(path))) as llm:
            assert llm.n_batch == llm.context_params.n_batch == llm.context_params.n_ubatch == n_batch
            assert llm.context_params.n_outputs_max <= 512
            assert f"prompts in batches of {n_batch} tokens" in provider_of(llm).summary()


@pytest.mark.parametrize("given", [{"n_batch": 700}, {"n_ubatch": 100}, {"logits_all": True}, {"embedding": True}])
def test_what_is_given_stays(given: dict[str, Any], tmp_path: Path) -> None:
    path = variant("many-experts", tmp_path)
    with closing(Llama(str(path), n_ctx=4096, **least(path), **given)) as llm:
        assert llm.n_batch == given.get("n_batch", 512)
        assert llm.context_params.n_ubatch == given.get("n_ubatch", 512)


def test_resident_experts_need_none(tmp_path: Path) -> None:
    path = variant("many-experts", tmp_path)
    with closing(Llama(str(path), n_ctx=4096, expert_pack=True, **FEW)) as llm:
        assert llm.n_batch == 512
    with closing(Llama(str(path), n_ctx=4096, **FEW)) as llm:
        assert llm.n_batch == 512, "nor does a model without a pack"


def test_a_prompt_in_one_batch_reads_each_expert_once_and_is_stocks(tmp_path: Path) -> None:
    path = variant("many-experts", tmp_path)
    n_tokens = 1000
    with closing(Llama(str(path), n_ctx=2048, n_batch=1024, n_ubatch=1024, **FEW)) as llm:
        expected = last_logits(llm, n_tokens)
    whole = open_pack(find_pack(path)).payload_bytes
    read = {}
    for n_batch in (None, 512):
        options = {**least(path), "expert_cache": whole * 15 // 100, "n_ctx": 2048}
        with closing(Llama(str(path), **options, **({} if n_batch is None else {"n_batch": n_batch}))) as llm:
            found = last_logits(llm, n_tokens)
            read[n_batch] = llm.expert_stats().loads
            assert n_batch is not None or np.array_equal(found, expected)
    assert read[None] < read[512]


def test_a_copy_has_the_same_batches(tmp_path: Path) -> None:
    path = variant("many-experts", tmp_path)
    with closing(Llama(str(path), n_ctx=2048, **least(path))) as llm:
        copied = pickle.dumps(llm)
    with closing(pickle.loads(copied)) as copy:
        assert copy.n_batch == copy.context_params.n_ubatch == 1024
