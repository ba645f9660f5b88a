"""Kernels that wait for the host: none where the driver ends long kernels, and one that waits too long loses nothing."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lab.identity import BUDGETS, Case, compare, small_models
from lab.logits import Run, differences, minimum_budget
from llama_expert_pack.pypack.drive.direct_io import pread_into
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from tests.books import wrong_books
from tests.runtime.packed import decode_error, evaluate, load, loaded, reads, variant

NAMES = ["type-MXFP4", "type-Q4_K", "many-experts", "expert-biases"]
SINGLE = [32, *[1] * 12]  # the last ones run as a captured graph, whose lookups wait
TIMEOUT = {"EXPERT_PACK_CUDA_LOOKUP_TIMEOUT_MS": "1000"}
ON_A_DISPLAY = {"EXPERT_PACK_CUDA_KERNEL_TIMEOUT": "1"}


def least(path: Path) -> dict[str, int]:
    return {"n_gpu_layers": -1, "expert_cache": minimum_budget(open_pack(find_pack(path))), "expert_ram": 0}


def slow(fd: int, buffer: memoryview, offset: int) -> int:
    """Longer than a lookup waits with TIMEOUT."""
    time.sleep(3)
    return pread_into(fd, buffer, offset)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def on_a_display(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Case, Run, Run]]:
    folder = tmp_path_factory.mktemp("display")
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_all(monkeypatch, ON_A_DISPLAY)
        models = small_models(folder, NAMES, ["gpt-oss"])
        return {
            (case.name, case.budget): (case, stock, ours) for case, stock, ours in compare(models, folder / "logits")
        }


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", [*NAMES, "gpt-oss-moe"])
def test_logits_are_identical_where_no_kernel_may_wait(
    name: str, budget: str, on_a_display: dict[tuple[str, str], tuple[Case, Run, Run]]
) -> None:
    _, stock, ours = on_a_display[name, budget]
    assert differences(stock, ours) == ""
    assert ours.stats["loads"] > 0 and ours.found["greedy"] == stock.found["greedy"]


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A packed model and the logits of an undisturbed run."""
    path = variant("many-experts", tmp_path)
    with loaded(path, **least(path)) as llm:
        return path, evaluate(llm, [*SINGLE, 1, 1])


def test_a_lookup_that_waits_too_long_fails_the_decode(
    model: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = model
    set_all(monkeypatch, TIMEOUT)
    with loaded(path, **least(path)) as llm:
        evaluate(llm, SINGLE)
        for n in (1, 2):  # the context is whole afterwards
            with reads(llm, slow, times=1) as delayed:
                assert "waited too long" in decode_error(lambda: evaluate(llm, [1]))
            assert delayed and llm.expert_stats().failures == n
            assert llm._provider is not None and wrong_books(llm._provider.cache) == []
        assert np.array_equal(evaluate(llm, [1, 1]), expected)


def test_no_kernel_waits_where_the_driver_would_end_it(
    model: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same reads and the same limit as in the test above."""
    path, expected = model
    set_all(monkeypatch, {**TIMEOUT, **ON_A_DISPLAY})
    with loaded(path, **least(path)) as llm:
        evaluate(llm, SINGLE)
        with reads(llm, slow, times=2) as delayed:
            assert np.array_equal(evaluate(llm, [1, 1]), expected)
        assert delayed and llm.expert_stats().failures == 0


def test_another_model_is_closed_while_a_lookup_waits(
    model: tuple[Path, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To free memory waits for all kernels of the GPU, and would keep the copies away that the lookup waits for."""
    path, expected = model
    set_all(monkeypatch, {"EXPERT_PACK_CUDA_LOOKUP_TIMEOUT_MS": "60000"})
    (tmp_path / "other").mkdir()
    other = load(variant("type-Q4_K", tmp_path / "other"), n_gpu_layers=-1, expert_cache="100%")
    evaluate(other, [8, 1, 1])
    with loaded(path, **least(path)) as llm:
        evaluate(llm, SINGLE)
        waits = threading.Event()

        def told(fd: int, buffer: memoryview, offset: int) -> int:
            waits.set()
            return slow(fd, buffer, offset)

        with reads(llm, told, times=1), ThreadPoolExecutor(1) as pool:
            rest = pool.submit(evaluate, llm, [1, 1])
            assert waits.wait(30)
            other.close()
            assert np.array_equal(rest.result(), expected)
        assert llm.expert_stats().failures == 0
