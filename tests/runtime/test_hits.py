"""What is in the cache costs no Python and no read, and is counted all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.logits import minimum_budget
from llama_expert_pack.bridge.provider import Provider
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from tests.runtime.packed import evaluate, loaded, provider_of, tokens_at, variant

N_STEPS = 24


def rewind(llm: Any) -> None:
    llm.reset()
    evaluate(llm, [40])
    llm.reset()


@pytest.mark.parametrize("name", ["type-Q4_K", "expert-biases", "two-groups", "no-gate", "gate-up", "dense-between"])
def test_with_all_experts_resident_native_calls_nobody(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = variant(name, tmp_path)
    pack = open_pack(find_pack(path))
    with loaded(path, expert_cache=pack.payload_bytes) as llm:
        every_expert(llm)
        calls: list[object] = []
        cache = type(provider_of(llm).cache)
        for owner, callback in (
            (cache, "choose_slots"),
            (cache, "prepare"),
            (Provider, "read"),
            (Provider, "open_arena"),
        ):
            monkeypatch.setattr(owner, callback, lambda *args: calls.append(args))
        before = llm.expert_stats()
        rewind(llm)
        evaluate(llm, [1] * N_STEPS)
        counted = llm.expert_stats().since(before)
    assert calls == []
    assert (counted.provider_calls, counted.misses, counted.loads, counted.read_bytes) == (0, 0, 0, 0)
    assert counted.wait_ns == 0
    assert counted.acquires == (1 + N_STEPS) * len(pack.layers)
    assert counted.hits > 0


def every_expert(llm: Any) -> None:
    """Bring all experts in: many tokens, until no evaluation adds one."""
    n_loads = -1
    while llm.expert_stats().loads != n_loads:
        n_loads = llm.expert_stats().loads
        llm.reset()
        llm.eval([i % 128 for i in range(128)])
        llm.reset()
        llm.eval([(i * 5 + 3) % 128 for i in range(128)])
        rewind(llm)
        evaluate(llm, [1] * N_STEPS)
        llm.reset()


@pytest.mark.parametrize("budget", ["all", "least"])
@pytest.mark.parametrize(("name", "top_k"), [("type-Q4_K", 2), ("many-experts", 6), ("one-expert-used", 1)])
def test_single_tokens_count_top_k_experts_in_every_layer(name: str, top_k: int, budget: str, tmp_path: Path) -> None:
    path = variant(name, tmp_path)
    pack = open_pack(find_pack(path))
    cache = pack.payload_bytes if budget == "all" else minimum_budget(pack)
    with loaded(path, expert_cache=cache) as llm:
        freq, last_use = provider_of(llm).cache.freq, provider_of(llm).cache.last_use
        for step in range(1, N_STEPS + 1):
            used_before, asked_before = last_use.copy(), freq.copy()
            llm.eval(tokens_at(llm.n_tokens, 1))
            asked = freq - asked_before
            assert set(np.unique(asked)) <= {0, 1}
            assert ((last_use > used_before) == (asked == 1)).all()
            for index, layer in enumerate(pack.layers):
                mine = slice(layer.first_key, layer.first_key + layer.n_expert)
                assert asked[mine].sum() == top_k
                number = (step - 1) * len(pack.layers) + index + 1  # acquires are numbered in order
                assert (last_use[mine][asked[mine] == 1] == number).all()
        stats = llm.expert_stats()
    assert int(freq.sum()) == N_STEPS * top_k * len(pack.layers) == stats.hits + stats.misses
    assert stats.acquires == N_STEPS * len(pack.layers)
    assert stats.misses == stats.loads


def test_a_batch_counts_each_expert_of_a_layer_once(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    with loaded(path, expert_cache="1GiB") as llm:
        llm.eval(tokens_at(0, 60))
        freq = provider_of(llm).cache.freq
        assert freq.max() == 1, "60 tokens in one batch are one acquire a layer"
        assert int(freq.sum()) == llm.expert_stats().misses
        llm.eval(tokens_at(60, 60))
        assert freq.max() == 2
