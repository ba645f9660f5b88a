"""From the constructor to the end: nothing stays open, nothing crashes, models do not disturb each other."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lab.logits import minimum_budget
from llama_expert_pack import Llama
from llama_expert_pack.pypack.errors import UsageError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.placement.cache import ExpertCache
from llama_expert_pack.pypack.source.match import find_pack
from tests.books import wrong_books
from tests.runtime.packed import (
    bits,
    evaluate,
    load,
    loaded,
    provider_of,
    run_python,
    tokens_at,
    upstream_model,
    variant,
)

BATCHES = [20, 1, 1]


def least(path: Path) -> int:
    return minimum_budget(open_pack(find_pack(path)))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# ---- close

USES: dict[str, Any] = {
    "eval": lambda llm: llm.eval([1]),
    "sample": lambda llm: llm.sample(),
    "generate": lambda llm: next(llm.generate([1, 2])),
    "tokenize": lambda llm: llm.tokenize(b"text"),
    "detokenize": lambda llm: llm.detokenize([1]),
    "tokenizer": lambda llm: llm.tokenizer().encode("text"),
    "create_completion": lambda llm: llm.create_completion("text"),
    "create_completion of tokens": lambda llm: llm.create_completion([1, 2]),
    "create_chat_completion": lambda llm: llm.create_chat_completion([{"role": "user", "content": "text"}]),
    "call": lambda llm: llm("text"),
    "embed": lambda llm: llm.embed("text"),
    "save_state": lambda llm: llm.save_state(),
    "n_ctx": lambda llm: llm.n_ctx(),
    "n_embd": lambda llm: llm.n_embd(),
    "n_vocab": lambda llm: llm.n_vocab(),
    "token_bos": lambda llm: llm.token_bos(),
    "token_eos": lambda llm: llm.token_eos(),
    "pooling_type": lambda llm: llm.pooling_type(),
    "ctx": lambda llm: llm.ctx,
    "model": lambda llm: llm.model,
}


@pytest.mark.parametrize("pack", [True, None])
def test_use_after_close_is_refused(pack: bool | None, tmp_path: Path) -> None:
    llm = load(variant("type-Q4_K", tmp_path), expert_pack=pack, embedding=True)
    evaluate(llm, BATCHES)
    state = llm.save_state()
    for _ in range(3):
        llm.close()
    for name, use in {**USES, "load_state": lambda llm: llm.load_state(state)}.items():
        with pytest.raises(RuntimeError, match="this Llama is closed"):
            use(llm)
            raise AssertionError(f"{name} returned")
    llm.close()


def test_close_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    llm = load(variant("type-Q4_K", tmp_path))
    stream = llm.create_completion([1, 2, 3], max_tokens=16, stream=True)
    next(stream)
    llm.close()
    with pytest.raises(RuntimeError, match="this Llama is closed"):
        list(stream)


def test_a_model_that_nobody_holds_is_freed(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    before = open_files(), threading.active_count()
    llm: Any = load(path)
    evaluate(llm, BATCHES)
    del llm
    gc.collect()
    assert (open_files(), threading.active_count()) == before
    with loaded(path) as again:
        evaluate(again, BATCHES)


def test_garbage_is_not_collected_inside_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed_inside: list[bool] = []
    inside = False

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            freed_inside.append(inside)

    prepare = ExpertCache.prepare

    def prepare_with_garbage(*arguments: Any) -> None:
        nonlocal inside
        inside = True
        Cycle()
        kept: list[list[int]] = [[] for _ in range(3 * gc.get_threshold()[0])]  # makes Python collect
        prepare(*arguments)
        inside = not kept

    monkeypatch.setattr(ExpertCache, "prepare", prepare_with_garbage)
    path = variant("type-Q4_K", tmp_path)
    with loaded(path) as llm:
        evaluate(llm, BATCHES)
    gc.collect()
    assert freed_inside and not any(freed_inside)
    assert gc.isenabled()


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise SystemExit(3)", "del llm; sys.exit(3)", "llm.close()"])
def test_a_process_may_end_without_close(end: str, tmp_path: Path) -> None:
    path, stats = variant("type-Q4_K", tmp_path), tmp_path / "stats.json"
    code = (
        "import sys\nfrom llama_expert_pack import Llama\n"
        "llm = Llama(sys.argv[1], expert_pack=True, expert_stats_path=sys.argv[2], n_threads=1, n_threads_batch=1,"
        f" verbose=False)\nllm.eval([1, 2, 3])\n{end}\n"
    )
    run = run_python(code, path, stats)
    assert run.returncode == (3 if "3" in end else 0), run.stderr
    assert "Traceback" not in run.stderr and "Exception ignored" not in run.stderr
    assert json.loads(stats.read_text())["acquires"] == 2, "the end of the process writes the last statistics"


def test_loading_and_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    path = upstream_model("qwen3moe-moe", tmp_path)

    def cycle() -> None:
        with loaded(path, expert_stats_path=tmp_path / "stats.json") as llm:
            evaluate(llm, BATCHES)

    for _ in range(3):  # what is kept once: backends, arenas of malloc
        cycle()
    gc.collect()
    n_files, n_threads, n_bytes = open_files(), threading.active_count(), rss_bytes()
    interval = sys.getswitchinterval()
    for _ in range(20):
        cycle()
    gc.collect()
    assert (open_files(), threading.active_count()) == (n_files, n_threads)
    assert sys.getswitchinterval() == interval
    # 20 leaks of the trunk, of the cache or of the context would be over 60 MiB
    assert rss_bytes() - n_bytes < 24 << 20


@pytest.mark.parametrize("fails_at", ["options", "pack", "load", "context", "statistics", "interrupt"])
def test_a_constructor_that_fails_leaves_nothing_behind(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = variant("type-Q4_K", tmp_path)
    with loaded(path) as llm:
        expected = evaluate(llm, BATCHES)
    cases: dict[str, dict[str, Any]] = {
        "options": {"expert_verify": "never"},
        "pack": {"expert_pack": tmp_path / "none.expert-pack"},
        "load": {"kv_overrides": {"qwen3moe.block_count": 77}},
        "context": {"type_v": 8},  # Q8_0, which needs flash attention
        "statistics": {"expert_stats_path": tmp_path / "none" / "stats.json"},
        "interrupt": {},
    }
    if fails_at == "interrupt":

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Llama, "_watch_decode", interrupted)
    before = open_files(), threading.active_count(), sys.getswitchinterval()
    with pytest.raises((Exception, KeyboardInterrupt)) as caught:
        load(path, **cases[fails_at])
    del caught
    gc.collect()
    assert (open_files(), threading.active_count(), sys.getswitchinterval()) == before
    monkeypatch.undo()
    with loaded(path) as llm:
        assert (evaluate(llm, BATCHES) == expected).all()


# ---- more than one


def test_two_packed_models_in_turns(tmp_path: Path) -> None:
    paths = [variant("type-Q4_K", tmp_path), variant("two-groups", tmp_path)]
    expected = []
    for path in paths:
        with loaded(path, expert_cache=least(path)) as llm:
            expected.append(evaluate(llm, [5] * 6))
    with loaded(paths[0], expert_cache=least(paths[0])) as a, loaded(paths[1], expert_cache=least(paths[1])) as b:
        for _ in range(6):
            evaluate(a, [5])
            evaluate(b, [5])
        assert (bits(a) == expected[0]).all()
        assert (bits(b) == expected[1]).all()
        a.close()
        b.eval(tokens_at(30, 5))
        with pytest.raises(UsageError, match="no expert pack"), loaded(paths[0], expert_pack=None) as plain:
            plain.expert_stats()


def test_two_models_in_two_threads(tmp_path: Path) -> None:
    paths = [variant("many-experts", tmp_path), upstream_model("qwen3next-moe", tmp_path)]

    def generate(path: Path) -> list[Any]:
        found = []
        for _ in range(3):
            with loaded(path, expert_cache=least(path)) as llm:
                found.append(evaluate(llm, [30, *[1] * 20]))
                assert wrong_books(provider_of(llm).cache) == []
        return found

    alone = [generate(path)[0] for path in paths]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(generate, paths))
    for expected, found in zip(alone, together, strict=True):
        assert all((logits == expected).all() for logits in found)


def test_closing_one_leaves_the_other_its_fast_switching(tmp_path: Path) -> None:
    usual = sys.getswitchinterval()
    with loaded(variant("type-Q4_K", tmp_path)):
        during = sys.getswitchinterval()
        assert during < usual
        with pytest.raises(UsageError), loaded(variant("two-groups", tmp_path), expert_policy="none"):
            pass
        with loaded(variant("two-groups", tmp_path)):
            pass
        assert sys.getswitchinterval() == during
    assert sys.getswitchinterval() == usual


def test_a_second_model_of_the_same_file_without_a_pack_is_stock(tmp_path: Path) -> None:
    """It must not take the first one's experts, which are gone when that one is closed."""
    path = variant("type-Q4_K", tmp_path)
    packed = Llama(str(path), expert_pack=True, expert_cache_reserve=0, n_ctx=64, n_threads=1, verbose=False)
    plain = Llama(str(path), n_ctx=64, n_threads=1, verbose=False)
    tokens = list(range(20))
    packed.eval(tokens)
    acquires = packed.expert_stats().acquires
    plain.eval(tokens)
    assert packed.expert_stats().acquires == acquires > 0
    packed.close()
    plain.eval(tokens)
    assert plain.n_tokens == 40
    plain.close()
