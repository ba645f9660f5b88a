"""Several models of one file with a pack: they share its slots, and each answers as if it were alone."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.logits import minimum_budget, run_jobs
from lab.synth.gguf_out import write_gguf
from lab.synth.model import write_model
from lab.variants import NARROW
from llama_expert_pack import Llama
from llama_expert_pack.bridge import shared_pack
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import UsageError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from llama_expert_pack.pypack.values.options import OPTIONS
from tests.books import wrong_books
from tests.runtime.packed import bits, evaluate, load, loaded, provider_of, tokens_at, variant
from tests.runtime.test_llama_run import ADAPTERS, LORA_KV

BATCHES = [20, 1, 1]
MANY = [30, 7, *[1] * 12]

pytestmark = pytest.mark.timeout(300)


def least(path: Path) -> int:
    return minimum_budget(open_pack(find_pack(path)))


def what_is_open() -> tuple[Any, ...]:
    gc.collect()
    n_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    return n_files, threading.active_count(), sys.getswitchinterval(), list(shared_pack._packs)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return variant("many-experts", tmp_path)


def stock_logits(path: Path, folder: Path) -> np.ndarray:
    """As bits, of all batches of MANY."""
    job = {"id": "stock", "stock": True, "model": str(path), "batches": MANY, "llama": {}}
    found = run_jobs([job], folder)["stock"]
    assert found.logits is not None, found.found
    return found.logits.view(np.uint32)


def in_turns(models: list[Llama]) -> None:
    for n in MANY:
        for llm in models:
            llm.eval(tokens_at(llm.n_tokens, n))


@pytest.fixture
def expected(path: Path, tmp_path: Path) -> np.ndarray:
    return stock_logits(path, tmp_path / "stock")


# ---- answers, slots, ends


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_models_of_one_file_share_its_slots_until_the_last_is_closed(
    order: tuple[int, ...], path: Path, expected: np.ndarray
) -> None:
    before = what_is_open()
    options = {"expert_cache": 3 * least(path)}
    models = [
        load(path, **options),
        load(path, n_ctx=512, **options),
        load(path, n_ubatch=16, use_mmap=False, **options),
    ]
    provider = provider_of(models[0])
    assert all(provider_of(llm) is provider for llm in models)
    in_turns(models)
    for llm in (models[0], models[1]):  # the third one cuts its batches otherwise
        assert (bits(llm) == expected).all()
    third = bits(models[2])
    for n_closed, i in enumerate(order, 1):
        models[i].close()
        for llm in (models[j] for j in order[n_closed:]):
            llm.reset()
            evaluate(llm, MANY)
            assert (bits(llm) == (third if llm is models[2] else expected)).all()
        assert wrong_books(provider.cache) == []
    assert what_is_open() == before
    with loaded(path, n_ubatch=16, expert_cache=least(path)) as alone:  # with other options, as all others are closed
        assert (evaluate(alone, MANY) == third).all()


def test_the_second_model_finds_the_experts_of_the_first(path: Path) -> None:
    with loaded(path, expert_cache="100%") as first:
        evaluate(first, BATCHES)
        before = first.expert_stats()
        with loaded(path, expert_cache="100%") as second:
            evaluate(second, BATCHES)
            during = second.expert_stats().since(before)
            assert second.expert_stats() == first.expert_stats(), "they are counted together"
    assert (during.misses, during.loads, during.evictions) == (0, 0, 0)
    assert during.hits == before.hits + before.misses and during.acquires == before.acquires
    assert second.expert_stats() == first.expert_stats(), "also when they are closed"


def test_a_chat_model_and_an_embedding_model(path: Path) -> None:
    text = "some text"
    with loaded(path, embedding=True, logits_all=False) as alone:
        vector = alone.embed(text)
    with loaded(path) as alone:
        expected = evaluate(alone, BATCHES)
    with loaded(path) as chat, loaded(path, embedding=True, logits_all=False, n_ctx=64) as embedding:
        assert embedding.embed(text) == vector
        assert (evaluate(chat, BATCHES) == expected).all()
        assert embedding.embed(text) == vector


def test_an_adapter_of_one_is_not_the_others(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", NARROW)
    convert(path)
    adapter = write_gguf(tmp_path / "lora.gguf", LORA_KV, ADAPTERS["all-experts"])
    ways: list[dict[str, Any]] = [{}, {"lora_path": str(adapter)}, {"lora_path": str(adapter), "lora_scale": 0.5}]
    expected = []
    for way in ways:
        with loaded(path, **way) as alone:
            expected.append(evaluate(alone, MANY))
    models = [load(path, expert_cache=least(path), **way) for way in ways]
    in_turns(models)
    for i, llm in enumerate(models):
        assert [bool((bits(llm) == logits).all()) for logits in expected] == [i == j for j in range(3)]
        llm.close()


@pytest.mark.parametrize("vocab_only", [(True, False), (False, True), (True, True, False, False)])
def test_only_the_vocabulary_beside_the_model(vocab_only: tuple[bool, ...], path: Path) -> None:
    with loaded(path) as alone:
        expected = evaluate(alone, BATCHES)
    models = [load(path, vocab_only=only) for only in vocab_only]
    for llm, only in zip(models, vocab_only, strict=True):
        assert llm.tokenize(b"text")
        assert only or (evaluate(llm, BATCHES) == expected).all()
        llm.close()


def test_a_notebook_cell_that_runs_again(path: Path) -> None:
    before = what_is_open()
    llm = load(path)
    expected = evaluate(llm, BATCHES)
    provider = provider_of(llm)
    for _ in range(3):
        llm = load(path)  # the old one lives until now
        assert provider_of(llm) is provider
        assert (evaluate(llm, BATCHES) == expected).all()
    cycle: Any = load(path)
    cycle.me = cycle
    del llm, cycle, provider
    assert what_is_open() == before


def test_an_interrupted_end_can_be_repeated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = what_is_open()
    llm: Any = load(path)
    close = shared_pack.SharedPack.close

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shared_pack.SharedPack, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    monkeypatch.setattr(shared_pack.SharedPack, "close", close)
    with pytest.raises(UsageError, match=r"still being loaded or closed on this thread: close it first"):
        load(path)
    llm.close()
    with loaded(path):
        pass
    del llm
    assert what_is_open() == before


def test_pickling_beside_the_original(path: Path) -> None:
    with loaded(path, expert_policy="lru") as llm:
        copy: Llama = pickle.loads(pickle.dumps(llm))
        assert provider_of(copy) is provider_of(llm)
        assert (evaluate(copy, BATCHES) == evaluate(llm, BATCHES)).all()
        copy.close()


# ---- options


DIFFERENT: dict[str, Any] = {
    "expert_cache": "9MiB",
    "expert_cache_reserve": "1MiB",
    "expert_direct_io": False,
    "expert_read_splits": 3,
    "expert_stage_slots": 3,
    "expert_verify": "every",
    "expert_policy": "lru",
    "expert_ram": "10MiB",
    "expert_trace": "other.trace",
    "expert_stats_path": "other.json",
    "expert_stats_interval": 3.0,
}


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(path, **options)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text and "close the other one first" in text
    return text


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_options_are_refused_with_both_values(
    name: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert {*DIFFERENT, "expert_pack"} == set(OPTIONS), "each option is tried"
    common = {"expert_cache": "10MiB", "expert_stats_path": "a.json", "expert_trace": "a.trace"}
    with loaded(path, **common) as first:
        expected = evaluate(first, BATCHES)
        ours = {**common, "expert_cache_reserve": 0}.get(name, OPTIONS[name].default)
        text = refused(path, **{**common, name: DIFFERENT[name]})
        assert f"{name}={ours!r}" in text and f"{name}={DIFFERENT[name]!r}" in text
        assert text.count("expert_") == 2, "no other option differs"
        assert not (tmp_path / "other.json").exists() and not (tmp_path / "other.trace").exists()
        with loaded(path, **common) as second:
            assert (evaluate(second, BATCHES) == expected).all()
        first.reset()
        assert (evaluate(first, BATCHES) == expected).all()


def test_the_same_options_in_other_words(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"expert_cache": "10MiB", "expert_trace": "a.trace", "expert_stats_path": "a.json"}
    again = {
        "expert_pack": os.path.relpath(find_pack(path)),
        "expert_cache": 10 << 20,
        "expert_cache_reserve": "0%",
        "expert_trace": tmp_path / "a.trace",
        "expert_stats_path": "./a.json",
        "expert_stats_interval": 10,
    }
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    with loaded(path, **options) as first, loaded(link, **{**again, "expert_pack": find_pack(path)}) as second:
        assert provider_of(second) is provider_of(first)
        with loaded(path, **again) as third:
            assert provider_of(third) is provider_of(first)
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")  # where the same name is another file
        assert "expert_trace='a.trace' and expert_stats_path='a.json'" in refused(path, **options)


def test_another_pack_is_refused(path: Path, tmp_path: Path) -> None:
    pack, copy = find_pack(path), tmp_path / "copy.expert-pack"
    for suffix in ("", ".manifest.json"):
        shutil.copy(f"{pack}{suffix}", f"{copy}{suffix}")
    with loaded(path) as first:
        expected = evaluate(first, BATCHES)
        text = refused(path, expert_pack=copy)
        assert repr(str(pack)) in text and repr(str(copy)) in text
        convert(path, force=True)
        assert f"{str(pack)!r}, which has been replaced since" in refused(path)
        first.reset()
        assert (evaluate(first, BATCHES) == expected).all()


def test_a_cache_for_fewer_experts_a_token_is_not_shared_with_more(path: Path) -> None:
    used = f"{open_pack(find_pack(path)).manifest.model.architecture}.expert_used_count"
    with loaded(path, kv_overrides={used: 1}):
        with pytest.raises(
            UsageError, match=r"is open already, with 1 experts a token, and can't be opened with \d+ beside it"
        ):
            load(path)
        with loaded(path, kv_overrides={used: 1}) as second:
            evaluate(second, BATCHES)


def test_a_copy_of_the_file_is_another_one(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    shutil.copy(path, other)
    with loaded(path) as first, loaded(other, expert_pack=find_pack(path), expert_policy="lru") as second:
        assert provider_of(first) is not provider_of(second)
        assert (evaluate(first, BATCHES) == evaluate(second, BATCHES)).all()
