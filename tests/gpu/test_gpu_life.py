"""VRAM: within the budget, back to where it was, and refused in a sentence."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab.logits import minimum_budget
from llama_expert_pack import ExpertPackError, UsageError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.replay.as_recorded import check_live
from llama_expert_pack.pypack.source.match import find_pack
from llama_expert_pack.pypack.trace.format import Kind
from llama_expert_pack.pypack.trace.trace import read_trace
from tests.books import wrong_books
from tests.runtime.packed import evaluate, load, loaded, variant

GPU = {"n_gpu_layers": -1, "expert_ram": 0}
MIB = 1 << 20


def vram_used_bytes() -> int:
    """Of the first GPU, by all processes."""
    command = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * MIB


def least(path: Path) -> int:
    return minimum_budget(open_pack(find_pack(path)))


def test_twenty_loads_give_back_all_vram(tmp_path: Path) -> None:
    path = variant("type-Q8_0", tmp_path)
    used = []
    for _ in range(21):
        with loaded(path, **GPU, expert_cache=least(path)) as llm:
            evaluate(llm, [16, 1, 1])
        used.append(vram_used_bytes())
    assert used[-1] == used[0], [n // MIB for n in used]


def test_more_vram_than_there_is_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = variant("type-Q8_0", tmp_path)
    with pytest.raises(ExpertPackError) as raised:
        load(path, **GPU, expert_cache=least(path), expert_cache_reserve="10TiB")
    assert "\n" not in str(raised.value) and "reserve" in str(raised.value)


def test_vram_stays_within_trunk_and_budget(tmp_path: Path) -> None:
    """The cache takes what it was given, once; nothing grows while experts come and go."""
    path = variant("many-experts", tmp_path)
    with loaded(path, **GPU, expert_cache=least(path)) as llm:
        evaluate(llm, [32, 1])
        after_first = vram_used_bytes()
        samples: list[int] = []
        done = threading.Event()

        def sample() -> None:
            while not done.wait(0.05):
                samples.append(vram_used_bytes())

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            evaluate(llm, [64, 7, *[1] * 64])
        finally:
            done.set()
            sampler.join()
        assert llm.expert_stats().evictions > 0
        # larger batches than before may grow the compute pool once
        assert max(samples, default=after_first) - after_first <= 64 * MIB


def test_models_of_one_file_share_the_cache(tmp_path: Path) -> None:
    path = variant("many-experts", tmp_path)
    options = {**GPU, "expert_cache": least(path)}
    batches = [32, 7, *[1] * 16]
    with loaded(path, **options) as alone:
        expected = evaluate(alone, batches)
    with loaded(path, **options) as first, loaded(path, **options) as second:
        assert first._provider is second._provider
        for _ in range(3):
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(lambda llm: evaluate(llm, batches), (first, second)))
            assert all((logits == expected).all() for logits in found)
            first.reset()
            second.reset()
        with pytest.raises(UsageError, match=r"computes blk\.0\S+ on CUDA0, this one would on CPU: .* n_gpu_layers"):
            load(path, **{**options, "n_gpu_layers": 0})
        second.close()
        assert (evaluate(first, batches) == expected).all()


def test_what_vram_does_not_hold_lies_in_host_memory_by_default(tmp_path: Path) -> None:
    path = variant("many-experts", tmp_path)
    n_experts = open_pack(find_pack(path)).n_keys
    with loaded(path, n_gpu_layers=-1, expert_cache=least(path)) as llm:
        for _ in range(3):
            evaluate(llm, [64, 7, *[1] * 8])
            llm.reset()
        assert llm._provider is not None and llm._provider.host_bytes["CUDA0"] > 0
        stats = llm.expert_stats()
    assert stats.loads <= n_experts and stats.host_hits > 0, "each was read once"


def test_layers_on_the_cpu_share_host_memory_with_those_on_the_gpu(tmp_path: Path) -> None:
    path = variant("many-experts", tmp_path)
    pack = open_pack(find_pack(path))
    with loaded(path, n_gpu_layers=-1, n_cpu_moe=1, expert_cache=least(path)) as llm:
        assert llm._provider is not None
        assert sorted(llm._provider.arena_bytes) == ["CPU", "CUDA0"]
        assert llm._provider.arena_bytes["CPU"] == pack.layers[0].n_expert * pack.layers[0].block_bytes
        evaluate(llm, [16, 1, 1])


@pytest.mark.parametrize("ram", [0, "100%"], ids=["vram", "host"])
def test_a_prompt_reads_the_next_layer_ahead_and_a_replay_counts_the_same(ram: int | str, tmp_path: Path) -> None:
    path = variant("type-Q8_0", tmp_path)
    pack = open_pack(find_pack(path))
    cache = pack.payload_bytes * 3 // 4 if ram == 0 else least(path)
    trace = tmp_path / "run.trace"
    batches = [60, 1, 1, 60, 60, 1]
    with loaded(path, n_gpu_layers=-1, expert_cache=pack.payload_bytes) as llm:
        expected = evaluate(llm, batches)
    with loaded(path, n_gpu_layers=-1, expert_cache=cache, expert_ram=ram, expert_trace=trace) as llm:
        assert (evaluate(llm, batches) == expected).all()
        assert llm._provider is not None and wrong_books(llm._provider.cache) == []
    recorded = read_trace(trace)
    assert (recorded.kind == Kind.AHEAD).any(), "nothing was read ahead"
    assert "gives the run's counters" in check_live(recorded)


@pytest.mark.parametrize("n_gpu_layers", [0, 2])
def test_layers_on_the_cpu_use_the_host_beside_it(n_gpu_layers: int, tmp_path: Path) -> None:
    path = variant("type-Q8_0", tmp_path)
    with loaded(path, n_gpu_layers=n_gpu_layers, expert_cache=least(path), expert_ram=0) as llm:
        evaluate(llm, [16, 1, 1])
        stats = llm.expert_stats()
        assert stats.loads > 0
        assert (stats.h2d_bytes > 0) == (n_gpu_layers > 0)
