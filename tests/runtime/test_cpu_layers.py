"""Layers whose experts are computed on the CPU, and the memory that is theirs; without a GPU all are."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lab.logits import minimum_budget
from llama_expert_pack.pypack.errors import BudgetError, UsageError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from tests.runtime.packed import evaluate, load, loaded, provider_of, variant

BATCHES = [20, 1, 2, 1]


@pytest.mark.parametrize("n_cpu_moe", [0, 1, 2, 99])
def test_the_answers_are_the_same(n_cpu_moe: int, tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    with loaded(path) as llm:
        expected = evaluate(llm, BATCHES)
    with loaded(path, expert_pack=None) as plain, loaded(path, expert_pack=None, n_cpu_moe=n_cpu_moe) as stock:
        assert (evaluate(stock, BATCHES) == evaluate(plain, BATCHES)).all()
    with loaded(path, n_cpu_moe=n_cpu_moe) as llm:
        assert (evaluate(llm, BATCHES) == expected).all()
        copy = pickle.loads(pickle.dumps(llm))
        try:
            assert (evaluate(copy, BATCHES) == expected).all()
        finally:
            copy.close()


def test_what_is_refused(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    for wrong in (-1, 1.5, True, "1"):
        with pytest.raises(UsageError, match=r"n_cpu_moe must be a whole number from 0 to 1024, not "):
            load(path, n_cpu_moe=wrong)
    with (
        loaded(path, n_cpu_moe=1) as llm,
        pytest.raises(UsageError, match=r"open already, with the experts of 1 layers on the CPU, .* those of 2 there"),
    ):
        load(path, n_cpu_moe=2)
    del llm


def test_expert_ram_is_their_memory(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    least = minimum_budget(open_pack(find_pack(path)))
    with loaded(path, expert_ram=least, expert_cache="1GiB") as llm:
        assert provider_of(llm).arena_bytes == {"CPU": least}
        evaluate(llm, BATCHES)
        stats = llm.expert_stats()
        assert stats.misses > 0 and stats.host_hits == stats.moves_up == stats.moves_down == 0
    with pytest.raises(
        BudgetError, match=r"the expert cache on CPU is too small: expert_ram comes to .* raise expert_ram"
    ):
        load(path, expert_ram=least - 1)
    for none in (0, "0", "0%"):
        with loaded(path, expert_ram=none, expert_cache=least) as llm:
            assert provider_of(llm).arena_bytes == {"CPU": least}
