"""Models of one file at the same time: they load, decode, fail and wait on threads of their own."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_expert_pack import Llama
from llama_expert_pack.pypack.drive.direct_io import pread_into
from llama_expert_pack.pypack.errors import DecodeError, UsageError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from tests.books import wrong_books
from tests.runtime.packed import bits, evaluate, load, loaded, provider_of, reads, variant
from tests.runtime.test_sharing import BATCHES, MANY, least, stock_logits, what_is_open
from tests.runtime.test_trace import check

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return variant("many-experts", tmp_path)


@pytest.fixture
def expected(path: Path, tmp_path: Path) -> np.ndarray:
    return stock_logits(path, tmp_path / "stock")


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What they returned, each on a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [found.result() for found in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("share", [0, 0.1])
def test_decoding_at_the_same_time(share: float, path: Path, tmp_path: Path, expected: np.ndarray) -> None:
    """The trace has all acquires of all, each once; its replay gives the counters."""
    cache = max(least(path), int(open_pack(find_pack(path)).payload_bytes * share))
    options = {"expert_cache": cache, "expert_trace": tmp_path / "a.trace", "expert_stats_path": tmp_path / "a.json"}
    with loaded(path, expert_cache=cache) as alone:
        evaluate(alone, MANY)
        n_acquires = alone.expert_stats().acquires
    models = [load(path, **options) for _ in range(3)]
    found = together([partial(evaluate, llm, MANY) for llm in models])
    assert all((logits == expected).all() for logits in found)
    assert wrong_books(provider_of(models[0]).cache) == []
    stats = models[0].expert_stats()
    assert stats.acquires == 3 * n_acquires and stats.failures == 0
    together([llm.close for llm in models])
    check(tmp_path / "a.trace", (stats.acquires, stats.hits, stats.misses, stats.evictions))
    assert json.loads((tmp_path / "a.json").read_text())["acquires"] == stats.acquires


def test_a_failure_of_one_is_not_the_others(path: Path) -> None:
    """One model needs an expert that can't be read, the other does not: only the first fails, and can go on afterwards."""
    with loaded(path, expert_cache="100%") as alone:
        used = []
        for token in (5, 6):
            before = provider_of(alone).cache.freq.copy()
            alone.reset()
            evaluate_token(alone, token)
            used.append(set(np.flatnonzero(provider_of(alone).cache.freq > before)))
        expected = bits(alone)
        key = min(used[0] - used[1])
    with loaded(path, expert_cache=least(path)) as failing, loaded(path, expert_cache=least(path)) as right:
        pack = open_pack(find_pack(path))
        layer = next(layer for layer in reversed(pack.layers) if layer.first_key <= key)
        offset = pack.offset(layer.index, int(key) - layer.first_key)

        def refuse_one(fd: int, buffer: memoryview, at: int) -> int:
            if at == offset:
                raise OSError(5, "made to fail")
            return pread_into(fd, buffer, at)

        is_done = threading.Event()

        def go_on() -> int:
            n = 0
            while not is_done.is_set():
                right.reset()
                evaluate_token(right, 6)
                assert (bits(right) == expected).all()
                n += 1
            return n

        def fail() -> None:
            try:
                for _ in range(10):
                    failing.reset()
                    with pytest.raises(DecodeError, match=f"expert {key - layer.first_key} of layer {layer.index}"):
                        evaluate_token(failing, 5)
            finally:
                is_done.set()

        with reads(failing, refuse_one):
            assert together([go_on, fail])[0] > 0
        assert failing.expert_stats().failures == 10
        evaluate_token(failing, 5)
        assert wrong_books(provider_of(right).cache) == []


def evaluate_token(llm: Llama, token: int) -> None:
    llm.eval([token])


FAILURES: list[dict[str, Any]] = [
    {"kv_overrides": {"qwen3moe.block_count": 77}},  # the load
    {"type_v": 8},  # the context
    {"expert_policy": "lru"},
]


def test_loading_while_another_one_decodes(path: Path, expected: np.ndarray) -> None:
    """Loads that work, that fail half way, and without the pack; and the ends of all."""
    options = {"expert_cache": least(path)}
    is_done = threading.Event()

    def decode() -> int:
        n = 0
        while not is_done.is_set():
            first.reset()
            assert (evaluate(first, MANY) == expected).all()
            n += 1
        return n

    def load_others() -> None:
        try:
            for failure in FAILURES:
                with loaded(path, **options) as second:
                    assert (evaluate(second, MANY) == expected).all()
                with pytest.raises((ValueError, RuntimeError, UsageError)):
                    load(path, **{**options, **failure})
                with loaded(path, expert_pack=None) as plain:
                    evaluate(plain, BATCHES)
        finally:
            is_done.set()

    with loaded(path, **options) as first:
        assert together([decode, load_others])[0] > 0
        assert wrong_books(provider_of(first).cache) == []


def test_loading_at_the_same_time(path: Path) -> None:
    with loaded(path) as alone:
        expected = evaluate(alone, BATCHES)
    before = what_is_open()
    for _ in range(3):
        models = together([partial(load, path)] * 4)
        assert len({id(provider_of(llm)) for llm in models}) == 1
        found = together([partial(evaluate, llm, BATCHES) for llm in models])
        assert all((logits == expected).all() for logits in found)
        together([llm.close for llm in models])
    del models
    assert what_is_open() == before


class Stopped:
    """Loads stop before llama.cpp's part, each on its own thread, until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_there, self.go_on = threading.Event(), threading.Event()
        usual: Any = Llama.model_params

        def wait(llm: Any, params: Any) -> None:
            self.is_there.set()
            assert self.go_on.wait(100)
            usual.fset(llm, params)

        monkeypatch.setattr(Llama, "model_params", property(usual.fget, wait))


@pytest.mark.parametrize("failure", [{}, FAILURES[0]])
def test_who_comes_during_a_load_waits_for_its_end(
    failure: dict[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, the next one is the first."""
    stopped = Stopped(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load, path, **failure)
        assert stopped.is_there.wait(100)
        second = pool.submit(load, path, expert_policy="lru")
        time.sleep(0.1)
        assert not second.done()
        stopped.go_on.set()
        if failure:
            assert isinstance(first.exception(), ValueError)
            second.result().close()
        else:
            assert "expert_policy='lru'" in str(second.exception())
            first.result().close()


def test_ctrl_c_while_it_waits_for_another_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = what_is_open()
    stopped = Stopped(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, path)
        assert stopped.is_there.wait(100)
        pest = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        pest.start()
        with pytest.raises(KeyboardInterrupt):
            load(path)
        pest.join()
        stopped.go_on.set()
        loading.result().close()
    del loading
    assert what_is_open() == before
