"""The constructor: a drop-in for llama_cpp.Llama that answers every wrong option with one sentence."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from lab.logits import minimum_budget
from lab.synth.model import write_model
from lab.variants import REFUSED_TYPES, TINY, VARIANTS, write_refused
from llama_expert_pack import ExpertPackError, Llama
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import BudgetError, NativeError, PackError, SourceMismatchError, UsageError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.ggml_types import NOT_COMPUTED_TYPES
from llama_expert_pack.pypack.source.match import find_pack
from llama_expert_pack.pypack.values.options import OPTIONS
from tests.runtime.packed import SMALL, bits, evaluate, load, loaded, provider_of, variant

BATCHES = [20, 1, 1]
USED = "qwen3moe.expert_used_count"


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text and "\n" not in text
    return text


@pytest.mark.parametrize("pack", [None, True])
@pytest.mark.parametrize("unknown", [{"n_ctxt": 1}, {"expert_cach": 1, "model": 2}])
def test_unknown_keywords_are_named(pack: bool | None, unknown: dict[str, Any], tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    with pytest.raises(TypeError, match=f"unknown keyword arguments: {', '.join(sorted(unknown))}"):
        Llama(str(path), expert_pack=pack, **unknown)


def test_every_keyword_of_llama_cpp_is_known(tmp_path: Path) -> None:
    """What its own pickling passes to the constructor is all it takes, and ours takes it."""
    path = variant("type-Q4_K", tmp_path)
    with loaded(path) as llm:
        state = llama_cpp.Llama.__getstate__(llm)  # type: ignore[no-untyped-call]
    state.pop("model_path")
    with loaded(path, **state) as llm:
        evaluate(llm, [3])


@pytest.mark.parametrize("where", ["beside", "str", "path", "elsewhere"])
def test_a_pack_is_found_or_given(where: str, tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    pack: Any = {"beside": True, "str": str(find_pack(path)), "path": find_pack(path)}.get(where)
    if where == "elsewhere":
        (tmp_path / "other").mkdir()
        for file in (find_pack(path), *tmp_path.glob("*.manifest.json")):
            file.rename(tmp_path / "other" / file.name)
        pack = tmp_path / "other" / "type-Q4_K.expert-pack"
    with loaded(path, expert_pack=pack) as llm:
        evaluate(llm, BATCHES)
        assert llm.expert_stats().loads > 0


@pytest.mark.parametrize("off", [None, False])
def test_without_a_pack_it_is_stock(off: bool | None, tmp_path: Path) -> None:
    path = VARIANTS["type-Q4_K"](tmp_path)  # there is no pack
    stock = llama_cpp.Llama(str(path), **SMALL)
    expected = evaluate(stock, BATCHES)
    stock.close()
    with loaded(path, expert_pack=off) as llm:
        assert (evaluate(llm, BATCHES) == expected).all()
        with pytest.raises(UsageError, match="has no expert pack"):
            llm.expert_stats()
        assert llm.model_params.use_extra_bufts


def test_a_model_path_may_be_a_path(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    llm = Llama(path, expert_pack=find_pack(path), **SMALL)
    assert llm.model_path == str(path)
    llm.close()


def test_a_missing_model(tmp_path: Path) -> None:
    for pack in (None, True):
        with pytest.raises(ValueError, match=r"Model path does not exist: .*none\.gguf"):
            load(tmp_path / "none.gguf", expert_pack=pack)


def test_a_missing_pack(tmp_path: Path) -> None:
    path = VARIANTS["type-Q4_K"](tmp_path)
    with pytest.raises(PackError) as caught:
        load(path)
    assert f"`expert-pack convert {path}`" in one_line(caught.value)
    with pytest.raises(PackError, match=r"none\.expert-pack does not exist"):
        load(path, expert_pack=tmp_path / "none.expert-pack")


def test_a_pack_of_another_model_is_refused(tmp_path: Path) -> None:
    """Even one of the same shape: only its weights differ."""
    path = variant("type-Q4_K", tmp_path)
    other = write_model(tmp_path / "other.gguf", TINY, seed=2)
    convert(other)
    with pytest.raises(SourceMismatchError) as caught:
        load(path, expert_pack=find_pack(other))
    assert "the weights outside the experts differ" in one_line(caught.value)
    different = write_model(tmp_path / "different.gguf", replace(TINY, n_expert=6))
    convert(different)
    with pytest.raises(SourceMismatchError):
        load(path, expert_pack=find_pack(different))


@pytest.mark.parametrize("name", ["type-Q4_K", "mixed-between-layers", "two-groups", "many-experts"])
def test_a_budget_below_the_working_set_names_the_least(name: str, tmp_path: Path) -> None:
    path = variant(name, tmp_path)
    least = minimum_budget(open_pack(find_pack(path)))
    with pytest.raises(BudgetError) as caught:
        load(path, expert_cache=least - 1)
    assert f"needs at least {least} bytes" in one_line(caught.value)
    with loaded(path, expert_cache=least) as llm:
        evaluate(llm, BATCHES)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"expert_cache": "much"}, UsageError, "expert_cache must be a size"),
        ({"expert_cache": "9" * 5000}, UsageError, "expert_cache is '9999"),
        ({"expert_cache": 10**5000}, UsageError, "out of range"),
        ({"expert_cache": "120%"}, UsageError, "more than 100%"),
        ({"expert_cache": np.array([1, 2])}, UsageError, "expert_cache must be a size"),  # says neither == nor !=
        ({"expert_cache": 1024}, BudgetError, "expert_cache comes to 1 KiB"),
        ({"expert_cache_reserve": -1}, UsageError, "expert_cache_reserve is -1"),
        ({"expert_cache_reserve": "900TiB"}, BudgetError, "expert_cache_reserve keeps 900 TiB of that"),
        ({"expert_read_splits": 0}, UsageError, "expert_read_splits must be a whole number from 1 to 1024, not 0"),
        ({"expert_read_splits": 2**31}, UsageError, "from 1 to 1024, not 2147483648"),
        ({"expert_read_splits": 64.0}, UsageError, "from 1 to 1024, not 64.0"),
        ({"expert_read_splits": 10**5000}, UsageError, "from 1 to 1024, not 0x"),
        ({"expert_stage_slots": 2**31}, UsageError, "expert_stage_slots must be a whole number from 1 to 1024"),
        ({"expert_stage_slots": 1025}, UsageError, "from 1 to 1024, not 1025"),
        ({"expert_stage_slots": 2.5}, UsageError, "expert_stage_slots"),
        ({"expert_direct_io": "no"}, UsageError, "expert_direct_io must be True or False, not 'no'"),
        ({"expert_verify": "always"}, UsageError, "expert_verify must be one of first, off, every, not 'always'"),
        ({"expert_verify": ["off"]}, UsageError, "expert_verify must be one of first, off, every"),
        ({"expert_policy": ["lru"]}, UsageError, "there is no cache policy ['lru']"),
        ({"expert_pack": ""}, UsageError, "expert_pack must be the path of a file, not ''"),
        ({"expert_pack": "a\0b"}, UsageError, r"expert_pack must be the path of a file, not 'a\x00b'"),
        ({"expert_pack": 5}, UsageError, "expert_pack must be the path of a file, not 5"),
        ({"expert_trace": ""}, UsageError, "expert_trace must be the path of a file, not ''"),
        ({"expert_trace": "a\0b"}, UsageError, "expert_trace must be the path"),
        ({"expert_trace": "/nowhere/x.trace"}, UsageError, "/nowhere/x.trace: the expert trace can't be written"),
        ({"expert_stats_path": "a\0b"}, UsageError, "expert_stats_path must be the path"),
        ({"kv_overrides": {USED: 2**40}}, UsageError, f"the override of {USED} must be a whole number from 1 to 5"),
        ({"kv_overrides": {USED: 0}}, UsageError, "from 1 to 5, not 0"),
        ({"kv_overrides": {USED: "four"}}, UsageError, "from 1 to 5, not 'four'"),
        ({"kv_overrides": {USED: float("nan")}}, UsageError, "from 1 to 5, not nan"),
        ({"split_mode": 2}, UsageError, "can't be used with a split_mode of rows"),
        ({"split_mode": 3}, UsageError, "can't be used with a split_mode of rows"),
        ({"expert_policy": "random"}, UsageError, "random"),
        ({"expert_stats_path": "/nowhere/stats.json"}, UsageError, "/nowhere/stats.json"),
        ({"expert_stats_path": "stats", "expert_stats_interval": 0}, UsageError, "interval"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options(options: dict[str, Any], error: type[ExpertPackError], text: str, tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    with loaded(path) as llm:  # what the process keeps for all models is there then
        evaluate(llm, [2])
    for _ in range(2):
        with nothing_stays(), pytest.raises(error) as caught:
            load(path, **options)
        assert text in one_line(caught.value) and len(one_line(caught.value)) < 500
    with loaded(path) as llm:  # nothing stays behind that would refuse the next one
        evaluate(llm, [2])


def descriptors() -> list[str]:
    """What the process has open, by name."""
    links = (file for file in Path("/proc/self/fd").iterdir() if file.is_symlink())
    return sorted(name for file in links if "/proc/" not in (name := os.path.realpath(file)))


def threads() -> set[str]:
    """The process's threads, native ones too."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


@contextmanager
def nothing_stays() -> Iterator[None]:
    """Descriptors and threads are those before."""
    open_before, threads_before = descriptors(), threads()
    yield
    end = time.monotonic() + 30
    while threads() - threads_before and time.monotonic() < end:
        time.sleep(0.01)  # one that was joined is still listed for a moment
    assert not threads() - threads_before
    assert descriptors() == open_before


def test_a_model_that_can_not_be_loaded_leaves_nothing(tmp_path: Path) -> None:
    """llama.cpp refuses the context (a quantized V cache needs flash attention) when pack and model are open."""
    path = variant("type-Q4_K", tmp_path)
    with loaded(path) as llm:
        evaluate(llm, [2])
    for _ in range(2):
        with nothing_stays(), pytest.raises(ValueError, match="Failed to create llama_context"):
            load(path, type_v=8, expert_trace=tmp_path / "x.trace", expert_stats_path=tmp_path / "stats.json")


@pytest.mark.parametrize("step", ["make_policy", "describe_blocks", "encode_header", "ExpertCache.add_arena"])
def test_a_provider_that_fails_midway_leaves_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = variant("type-Q4_K", tmp_path)
    with loaded(path) as llm:
        evaluate(llm, [2])

    def fail(*_: object) -> None:
        raise MemoryError

    with nothing_stays(), monkeypatch.context() as patch:
        patch.setattr(f"llama_expert_pack.bridge.provider.{step}", fail)
        with pytest.raises((MemoryError, NativeError)):
            load(path, expert_trace=tmp_path / "x.trace")
    with loaded(path) as llm:
        evaluate(llm, [2])


WITHOUT_PACK: list[tuple[dict[str, Any], str]] = [({name: "x"}, name) for name in OPTIONS if name != "expert_pack"]
WITHOUT_PACK += [({"expert_policy": "no-such-policy", "expert_cache": 1}, "expert_cache, expert_policy")]


@pytest.mark.parametrize(("options", "names"), WITHOUT_PACK, ids=[names for _, names in WITHOUT_PACK])
@pytest.mark.parametrize("off", [None, False])
def test_options_without_a_pack_are_refused(
    off: bool | None, options: dict[str, Any], names: str, tmp_path: Path
) -> None:
    path = VARIANTS["type-Q4_K"](tmp_path)
    with pytest.raises(UsageError) as caught:
        Llama(path, expert_pack=off, **SMALL, **options)
    assert one_line(caught.value).startswith(f"{names} would have no effect without expert_pack: ")


def test_kv_overrides_change_the_working_set(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    pack = open_pack(find_pack(path))
    options = {"kv_overrides": {"qwen3moe.expert_used_count": 4}}
    with pytest.raises(BudgetError, match="top-4"):
        load(path, expert_cache=minimum_budget(pack, 4) - 1, **options)
    with loaded(path, expert_cache=minimum_budget(pack, 4), **options) as llm:
        evaluate(llm, BATCHES)


def test_statistics_are_written_while_it_runs_and_at_close(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    file = tmp_path / "stats.json"
    with loaded(path, expert_stats_path=file, expert_stats_interval=0.02) as llm:
        llm.eval([1, 2, 3])
        deadline = time.monotonic() + 30
        while json.loads(file.read_text())["acquires"] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert json.loads(file.read_text())["acquires"] == 2
    with loaded(path, expert_stats_path=str(file), expert_stats_interval=1e6) as llm:
        assert json.loads(file.read_text())["acquires"] == 0
        evaluate(llm, BATCHES)
        last = llm.expert_stats()
    assert json.loads(file.read_text()) == last.to_dict()
    assert llm.expert_stats() == last, "the counters stay readable after close"


@pytest.mark.parametrize("pack", [None, True])
def test_pickling(pack: bool | None, tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    options = {"expert_cache": minimum_budget(open_pack(find_pack(path))), "expert_policy": "lru"} if pack else {}
    with loaded(path, expert_pack=pack, n_ubatch=32, **options) as llm:
        expected = evaluate(llm, BATCHES)
        n_slots = provider_of(llm).cache.n_slots if pack else 0
        data = pickle.dumps(llm)
    copy: Llama = pickle.loads(data)
    try:
        assert (evaluate(copy, BATCHES) == expected).all()
        assert copy.context_params.n_ubatch == 32
        if pack:
            assert provider_of(copy).cache.n_slots == n_slots
            assert copy.expert_stats().loads > 0
    finally:
        copy.close()


def test_from_pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client is not installed here and the network not needed: the three names that are used stand in."""
    path = variant("type-Q4_K", tmp_path)

    class FileSystem:
        def ls(self, repo: str, recursive: bool) -> list[str]:
            return [f"{repo}/{path.name}"]

    hub, utils = types.ModuleType("huggingface_hub"), types.ModuleType("huggingface_hub.utils")
    hub.hf_hub_download, hub.HfFileSystem = lambda **_: str(path), FileSystem  # type: ignore[attr-defined]
    utils.validate_repo_id = lambda repo: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    with loaded(path) as llm:
        expected = evaluate(llm, BATCHES)
    llm = Llama.from_pretrained("someone/something", "*.gguf", expert_pack=True, **SMALL)
    try:
        assert type(llm) is Llama
        assert (evaluate(llm, BATCHES) == expected).all()
        assert llm.expert_stats().loads > 0
    finally:
        llm.close()
    with pytest.raises(TypeError, match="expert_pac"):
        Llama.from_pretrained("someone/something", "*.gguf", expert_pac=True)


def test_only_the_vocabulary(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    with loaded(path, vocab_only=True) as llm:
        assert llm.n_vocab() == 128
        assert llm.tokenize(b"text")


@pytest.mark.parametrize("options", [{"use_mlock": True}, {"use_mlock": True, "use_mmap": False}, {"n_ctx": 0}])
def test_other_ways_to_load(options: dict[str, Any], tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    with loaded(path) as llm:
        expected = evaluate(llm, BATCHES)
    with loaded(path, **options) as llm:
        evaluate(llm, BATCHES)
        assert (bits(llm) == expected).all()


@pytest.mark.parametrize("name", REFUSED_TYPES)
def test_experts_that_llama_cpp_cannot_compute_are_refused(name: str, tmp_path: Path) -> None:
    """Stock would load the model and crash in the first evaluation."""
    path = write_refused(tmp_path, name)
    convert(path)
    with pytest.raises(ExpertPackError, match=rf"ffn_\w+_exps.weight is of type {name}, which llama.cpp cannot"):
        Llama(str(path), expert_pack=True, verbose=False)


def test_the_refused_types_are_those_that_crash_stock() -> None:
    assert set(REFUSED_TYPES) == NOT_COMPUTED_TYPES


def test_an_interval_without_a_file_for_the_statistics(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    with pytest.raises(UsageError, match="expert_stats_interval would have no effect without expert_stats_path"):
        load(path, expert_stats_interval=5.0)


def test_a_folder_in_place_of_a_pack_or_a_model(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    for model, pack in ((path, "."), (path, "/"), (".", True)):
        with pytest.raises(ExpertPackError, match=r"is a folder|Is a directory"):
            load(Path(model), expert_pack=pack)


@pytest.mark.parametrize("verbose", [True, False])
def test_a_start_says_where_experts_have_room(verbose: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = variant("type-Q4_K", tmp_path)
    with loaded(path, verbose=verbose, expert_cache=minimum_budget(open_pack(find_pack(path)))):
        said = capfd.readouterr().err
    assert (
        f"expert pack {find_pack(path)}: " in said and " on CPU; prompts in batches of 64 tokens; policy " in said
    ) == verbose
