"""Reads and copies that fail under a GPU cache: the decode fails or waits, the next one is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lab.logits import minimum_budget
from llama_expert_pack.bridge._provider import lib
from llama_expert_pack.pypack.drive.direct_io import pread_into
from llama_expert_pack.pypack.errors import BudgetError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from tests.books import wrong_books
from tests.runtime.packed import decode_error, evaluate, flip_every_block, loaded, reads, refused, variant

BATCHES = [32, 1, 1, 7, 1]


def options_for(path: Path, **options: object) -> dict[str, object]:
    return {
        "n_gpu_layers": -1,
        "expert_cache": minimum_budget(open_pack(find_pack(path))),
        "expert_ram": 0,
        "expert_verify": "every",
        **options,
    }


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A packed model and the logits of an undisturbed run."""
    path = variant("type-Q4_K", tmp_path)
    with loaded(path, **options_for(path)) as llm:
        return path, evaluate(llm, BATCHES)


@pytest.mark.parametrize("n_before", [0, 1], ids=["in-prefill", "in-decode"])
def test_reads_that_go_on_failing_fail_the_decode_and_the_next_one_is_right(
    n_before: int, model: tuple[Path, np.ndarray]
) -> None:
    path, expected = model
    with loaded(path, **options_for(path)) as llm:
        evaluate(llm, BATCHES[:n_before])
        with reads(llm, refused(5)) as broken:
            text = decode_error(lambda: evaluate(llm, BATCHES[n_before : n_before + 1]))
        assert broken and "Input/output error" in text
        assert np.array_equal(evaluate(llm, BATCHES[n_before:]), expected)
        assert llm.expert_stats().failures == 1


@pytest.mark.parametrize("n_before", [0, 1], ids=["in-prefill", "in-decode"])
def test_a_damaged_pack_fails_the_decode_until_it_is_mended(n_before: int, model: tuple[Path, np.ndarray]) -> None:
    path, expected = model
    pack = open_pack(find_pack(path))
    with loaded(path, **options_for(path)) as llm:
        evaluate(llm, BATCHES[:n_before])
        flip_every_block(pack)
        text = decode_error(lambda: evaluate(llm, BATCHES[n_before : n_before + 1]))
        flip_every_block(pack)
        assert "checksum" in text
        assert np.array_equal(evaluate(llm, BATCHES[n_before:]), expected)


def test_one_failing_read_is_retried(model: tuple[Path, np.ndarray]) -> None:
    path, expected = model
    with loaded(path, **options_for(path)) as llm, reads(llm, refused(5), times=1) as broken:
        assert np.array_equal(evaluate(llm, BATCHES), expected)
        assert broken and llm.expert_stats().io_retries == 1


def test_a_copy_that_fails_fails_the_decode(model: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = model
    with loaded(path, **options_for(path)) as llm:
        provider = llm._provider
        assert provider is not None
        fds = provider.blocks["fd"].copy()
        provider.blocks["fd"] = -1  # native leaves all reads to the provider

        class NowhereToCopyTo:
            def __getattr__(self, name: str) -> object:
                if name == "expert_store_fill":
                    return lambda store, slot, block, n: lib.expert_store_fill(store, 1 << 30, block, n)
                return getattr(lib, name)

        monkeypatch.setattr("llama_expert_pack.bridge.provider.lib", NowhereToCopyTo())
        text = decode_error(lambda: evaluate(llm, BATCHES[:1]))
        monkeypatch.undo()
        provider.blocks["fd"] = fds
        assert "could not be copied to the device" in text
        assert np.array_equal(evaluate(llm, BATCHES), expected)


@pytest.mark.parametrize("n_before", [0, 1], ids=["in-prefill", "in-decode"])
def test_a_slow_read_is_waited_for(n_before: int, model: tuple[Path, np.ndarray]) -> None:
    path, expected = model
    with loaded(path, **options_for(path)) as llm:

        def slow(fd: int, buffer: memoryview, offset: int) -> int:
            time.sleep(30 if n_before else 3)
            return pread_into(fd, buffer, offset)

        evaluate(llm, BATCHES[:n_before])
        with reads(llm, slow, times=1) as delayed:
            assert np.array_equal(evaluate(llm, BATCHES[n_before:]), expected)
        assert len(delayed) == 1


def wrong_digest(blocks: np.ndarray) -> None:
    blocks["digest"][:, 7] ^= 1


def every_other_one_is_closed(blocks: np.ndarray) -> None:
    blocks["fd"][::2] = 1 << 30
    blocks["fd"][1::4] = -1


@pytest.mark.parametrize("damage", [wrong_digest, every_other_one_is_closed])
def test_what_native_reads_wrong_the_provider_reads_again(
    damage: Callable[[np.ndarray], None], model: tuple[Path, np.ndarray]
) -> None:
    path, expected = model
    with loaded(path, **options_for(path)) as llm:
        assert llm._provider is not None
        damage(llm._provider.blocks)
        assert np.array_equal(evaluate(llm, BATCHES), expected)
        stats = llm.expert_stats()
        assert wrong_books(llm._provider.cache) == []
    assert 0 < stats.io_errors == stats.io_retries and stats.failures == 0


@pytest.mark.parametrize("n_before", [0, 1], ids=["in-prefill", "in-decode"])
def test_slots_that_cannot_be_chosen_fail_the_decode(
    n_before: int, model: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads have started by then: they must disturb nothing."""
    path, expected = model

    def full(*_: object) -> list[int]:
        time.sleep(0.05)
        raise BudgetError("no slots today")

    with loaded(path, **options_for(path, expert_stage_slots=2)) as llm:
        evaluate(llm, BATCHES[:n_before])
        assert llm._provider is not None
        monkeypatch.setattr(llm._provider.cache, "choose_slots", full)
        llm._provider.cache.next_slots[:] = -1  # or native would not ask
        for _ in range(5):
            assert "no slots today" in decode_error(lambda: evaluate(llm, BATCHES[n_before : n_before + 1]))
        monkeypatch.undo()
        assert np.array_equal(evaluate(llm, BATCHES[n_before:]), expected)
        assert llm.expert_stats().failures == 5
