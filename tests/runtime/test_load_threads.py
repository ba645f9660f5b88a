"""Loads on several threads: a store gives experts only to the load that it was opened for."""

from __future__ import annotations

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_expert_pack import Llama
from tests.runtime.packed import evaluate, load, loaded, variant

BATCHES = [20, 1, 1]
PLAIN = {"expert_pack": None, "expert_cache_reserve": "1GiB"}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return variant("type-Q4_K", tmp_path)


@pytest.fixture
def expected(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits with the pack, and of stock."""
    with loaded(path) as packed, loaded(path, **PLAIN) as plain:
        return evaluate(packed, BATCHES), evaluate(plain, BATCHES)


class Meeting:
    """Stops loads with a pack between the opening of the store and the load of the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.go_on = threading.Event(), threading.Event()
        usual: Any = Llama.model_params

        def wait(llm: Any, params: Any) -> None:
            if llm._provider is not None:
                self.opened.set()
                assert self.go_on.wait(100)
            usual.fset(llm, params)

        monkeypatch.setattr(Llama, "model_params", property(usual.fget, wait))


@pytest.mark.parametrize("first_to_close", ["packed", "plain"])
def test_a_load_without_a_pack_while_one_with_a_pack_is_under_way(
    first_to_close: str, path: Path, expected: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, path)
        assert meeting.opened.wait(100)
        plain = load(path, **PLAIN)
        meeting.go_on.set()
        packed = loading.result()
    models = {"packed": packed, "plain": plain}
    assert (evaluate(packed, BATCHES) == expected[0]).all()
    acquires = packed.expert_stats().acquires
    assert (evaluate(plain, BATCHES) == expected[1]).all()
    assert packed.expert_stats().acquires == acquires > 0
    models.pop(first_to_close).close()
    for name, llm in models.items():
        llm.reset()
        assert (evaluate(llm, BATCHES) == expected[name == "plain"]).all()
        llm.close()


@pytest.mark.parametrize("failure", [{"kv_overrides": {"qwen3moe.block_count": 77}}, {"type_v": 8}])
def test_a_load_with_a_pack_that_fails_leaves_nothing(
    failure: dict[str, Any], path: Path, expected: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, path, **failure)
        assert meeting.opened.wait(100)
        with loaded(path, **PLAIN) as plain:
            meeting.go_on.set()
            assert isinstance(loading.exception(), ValueError | RuntimeError)
            assert (evaluate(plain, BATCHES) == expected[1]).all()
    with loaded(path, **PLAIN) as plain, loaded(path) as packed:
        assert (evaluate(plain, BATCHES) == expected[1]).all()
        assert (evaluate(packed, BATCHES) == expected[0]).all()


def test_many_loads_at_the_same_time(path: Path, expected: tuple[np.ndarray, np.ndarray]) -> None:
    """Three threads with packs for two files, which some of them share, two without, closing as it comes."""
    paths = [path, path.with_name("other.gguf")]
    paths[1].write_bytes(path.read_bytes())
    pack = path.with_suffix(".expert-pack")

    def rounds(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(12):
            with_pack, model = seed % 2 == 0, paths[chance.randrange(2)]
            options: dict[str, Any] = {"expert_pack": pack} if with_pack else PLAIN
            if chance.random() < 0.25:
                with pytest.raises((ValueError, RuntimeError)):
                    load(model, **options, type_v=8)
                continue
            with loaded(model, **options) as llm:
                assert (evaluate(llm, BATCHES) == expected[not with_pack]).all()
            del llm

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(rounds, range(5)))
    gc.collect()
    with loaded(path) as llm:
        assert (evaluate(llm, BATCHES) == expected[0]).all()
