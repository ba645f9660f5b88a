"""Reads that fail: what returns has the logits of an undisturbed run, what raises undoes itself."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.logits import minimum_budget
from lab.make_model import make_model
from llama_expert_pack import ExpertPackError
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.drive.direct_io import pread_into
from llama_expert_pack.pypack.errors import BudgetError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from tests.books import wrong_books
from tests.runtime.packed import (
    FAULTS,
    bits,
    decode_error,
    evaluate,
    flip_every_block,
    flipped_byte,
    loaded,
    provider_of,
    reads,
    refused,
    tokens_at,
    upstream_model,
    variant,
)

# attention; sliding windows; recurrent layers between attention; a memory of their own kind; experts in two groups
ARCHITECTURES = [
    "qwen3moe-moe",
    "gpt-oss-moe",
    "qwen3next-moe",
    "lfm2moe-moe",
    "kimi-k3-moe",
    "minimax-01-moe",
    "deepseek2-moe",
    "deepseek4-moe",
    "llama4-moe",
    "smallthinker-moe",
    "grovemoe-moe",
]
BATCHES = [20, 7, 1, 1, 13, 1, 1]  # of up to 16 tokens, in steps of up to 8
SMALL_STEPS = {"n_batch": 16, "n_ubatch": 8}


def least(path: Path) -> int:
    return minimum_budget(open_pack(find_pack(path)))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("direct_io", [True, False])
def test_one_fault_is_retried_and_changes_nothing(fault: str, direct_io: bool, tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    options = {"expert_cache": least(path), "expert_verify": "every", "expert_direct_io": direct_io}
    with loaded(path, **options) as llm:
        expected = evaluate(llm, BATCHES)
    for after in range(0, 12, 3):
        with loaded(path, **options) as llm:
            with reads(llm, FAULTS[fault], after=after, times=1) as broken:
                found = evaluate(llm, BATCHES)
            stats = llm.expert_stats()
        assert len(broken) == 1
        assert (found == expected).all()
        n_errors = 0 if fault == "short-read" else 1  # a read that gives less is gone on with
        assert (stats.io_errors, stats.io_retries, stats.failures) == (n_errors, n_errors, 0)


def wrong_digest(blocks: np.ndarray) -> None:
    blocks["digest"][:, 7] ^= 1


def closed_file(blocks: np.ndarray) -> None:
    blocks["fd"] = 1 << 30


def end_of_the_file(blocks: np.ndarray) -> None:
    blocks["offset"] += 1 << 40


def every_other_one(blocks: np.ndarray) -> None:
    blocks["fd"][::2] = 1 << 30
    blocks["fd"][1::4] = -1


@pytest.mark.parametrize("budget", ["least", "all"])
@pytest.mark.parametrize("damage", [wrong_digest, closed_file, end_of_the_file, every_other_one])
def test_what_native_reads_wrong_the_provider_reads_again(
    damage: Callable[[np.ndarray], None], budget: str, tmp_path: Path
) -> None:
    path = variant("type-Q4_K", tmp_path)
    options = {"expert_cache": least(path) if budget == "least" else "1GiB", "expert_verify": "every"}
    with loaded(path, **options) as llm:
        expected = evaluate(llm, BATCHES)
        undisturbed = llm.expert_stats()
    with loaded(path, **options) as llm:
        damage(provider_of(llm).blocks)
        found = evaluate(llm, BATCHES)
        stats = llm.expert_stats()
        assert wrong_books(provider_of(llm).cache) == []
    assert (found == expected).all()
    assert (stats.loads, stats.failures) == (undisturbed.loads, 0)
    assert stats.io_errors == stats.io_retries
    if damage is every_other_one:
        assert 0 < stats.io_errors < stats.loads
    else:
        assert stats.io_errors == stats.loads


@pytest.mark.parametrize("stage_slots", [1, 3])
@pytest.mark.parametrize("read_splits", [1, 7])
def test_few_reads_at_once_and_many_parts_change_nothing(stage_slots: int, read_splits: int, tmp_path: Path) -> None:
    path = make_model(tmp_path / "m.gguf", "qwen3moe", n_layer=2, n_expert=8, n_embd=2048, n_ff_exp=1024, type="Q8_0")
    convert(path)
    with loaded(path, expert_cache="1GiB") as llm:
        expected = evaluate(llm, BATCHES)
    options = {"expert_stage_slots": stage_slots, "expert_read_splits": read_splits, "expert_verify": "every"}
    with loaded(path, expert_cache=least(path), **options) as llm:
        found = evaluate(llm, BATCHES)
        stats = llm.expert_stats()
    assert (found == expected).all()
    assert stats.evictions > 0 and stats.io_errors == 0
    assert stats.read_bytes == stats.loads * open_pack(find_pack(path)).layers[0].block_bytes


@pytest.mark.parametrize("fault", FAULTS)
def test_an_expert_that_cannot_be_read_fails_the_decode_by_name(fault: str, tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    with loaded(path) as llm, reads(llm, FAULTS[fault]):
        with pytest.raises(RuntimeError) as caught:
            llm.eval(tokens_at(0, 5))
        stats = llm.expert_stats()
    assert isinstance(caught.value, ExpertPackError)
    text = str(caught.value)
    assert str(find_pack(path)) in text
    assert "expert" in text and "of layer 0" in text and "\n" not in text
    assert stats.failures == 1
    assert stats.io_errors == stats.io_retries + stats.misses - stats.loads, "each lost read: 3 retries, then the error"
    assert stats.io_retries >= 3


@pytest.mark.parametrize(
    ("name", "budget"), [*((name, "least") for name in ARCHITECTURES), *((name, "all") for name in ARCHITECTURES[:3])]
)
def test_a_failed_evaluation_can_be_repeated(name: str, budget: str, tmp_path: Path) -> None:
    """Every evaluation fails at its first, fourth and tenth read, then succeeds: bit for bit an undisturbed run."""
    path = upstream_model(name, tmp_path)
    options = {**SMALL_STEPS, "expert_cache": least(path) if budget == "least" else "1GiB"}
    with loaded(path, **options) as llm:
        expected = evaluate(llm, BATCHES)
    n_failed = 0
    with loaded(path, **options) as llm:
        for n in BATCHES:
            tokens = tokens_at(llm.n_tokens, n, llm.n_vocab())
            for after in (0, 3, 9):
                n_before, known = llm.n_tokens, bits(llm)
                with reads(llm, refused(errno.EIO), after=after) as broken:
                    try:
                        llm.eval(tokens)
                    except ExpertPackError:
                        assert llm.n_tokens == n_before
                        n_failed += 1
                    else:
                        assert not broken
                        assert (bits(llm) == expected[: llm.n_tokens]).all()
                        llm._roll_back(n_before)
                assert (bits(llm) == known).all()
            llm.eval(tokens)
        assert (bits(llm) == expected).all()
        assert llm.expert_stats().failures >= n_failed
        assert wrong_books(provider_of(llm).cache) == []
    assert n_failed > 0


def test_random_faults_never_change_a_token(tmp_path: Path) -> None:
    """One read in five fails, in four ways; whatever returns is right."""
    path = variant("many-experts", tmp_path)
    options = {**SMALL_STEPS, "expert_cache": least(path), "expert_verify": "every"}
    with loaded(path, **options) as llm:
        expected = evaluate(llm, BATCHES)
    for seed in range(4):
        draw = np.random.default_rng(seed)

        def pread(fd: int, buffer: memoryview, offset: int, draw: np.random.Generator = draw) -> int:
            if draw.random() < 0.8:
                return pread_into(fd, buffer, offset)
            return FAULTS[draw.choice(list(FAULTS))](fd, buffer, offset)

        with loaded(path, **options) as llm, reads(llm, pread):
            for n in BATCHES:
                while True:
                    try:
                        llm.eval(tokens_at(llm.n_tokens, n))
                    except ExpertPackError:
                        continue
                    break
            assert (bits(llm) == expected).all()
            assert llm.expert_stats().io_retries > 0


def test_one_damaged_expert_fails_only_the_evaluations_that_use_it(tmp_path: Path) -> None:
    path = variant("many-experts", tmp_path)
    pack = open_pack(find_pack(path))
    with loaded(path) as llm:
        evaluate(llm, [1] * 20)
        expected = bits(llm)
        used = np.flatnonzero(provider_of(llm).cache.freq)
    damaged = int(used[len(used) // 2])
    layer = next(x for x in pack.layers if x.first_key <= damaged < x.first_key + x.n_expert)
    start = pack.offset(layer.index, damaged - layer.first_key)

    def pread(fd: int, buffer: memoryview, offset: int) -> int:
        here = start <= offset < start + layer.block_bytes
        return (flipped_byte if here else pread_into)(fd, buffer, offset)

    with loaded(path) as llm:
        with reads(llm, pread):
            n_right = 0
            while n_right < 20:
                try:
                    llm.eval(tokens_at(llm.n_tokens, 1))
                except ExpertPackError as error:
                    assert f"expert {damaged - layer.first_key} of layer {layer.index} has checksum" in str(error)
                    break
                n_right += 1
            assert n_right < 20
            assert (bits(llm) == expected[:n_right]).all()
            assert provider_of(llm).cache.slot_of[damaged] == -1
        evaluate(llm, [1] * (20 - n_right))
        assert (bits(llm) == expected).all()


def test_the_reason_is_that_of_the_last_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the provider knows it or native: what one failure said is not said again."""

    def broken(*_: object) -> list[int]:
        raise BudgetError("no slots today")

    with loaded(variant("type-Q4_K", tmp_path)) as llm:
        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(provider_of(llm).cache, "choose_slots", broken)
                provider_of(llm).cache.next_slots[:] = -1  # or native would not ask
                assert decode_error(lambda: llm.eval([1, 2, 3])) == "no slots today"
            for code, why in ((errno.EIO, "Input/output error"), (errno.EINVAL, "Invalid argument")):
                with reads(llm, refused(code)):
                    assert why in decode_error(lambda: llm.eval([1, 2, 3]))
        llm.eval([1, 2, 3])


def test_errors_that_are_not_ours_stay_what_they_are(tmp_path: Path) -> None:
    """More tokens than the context holds: llama_decode's own error, and the state is as before."""
    with loaded(variant("type-Q4_K", tmp_path)) as llm:
        expected = evaluate(llm, [200])
        with pytest.raises(RuntimeError, match="llama_decode returned 1") as caught:
            llm.eval(tokens_at(200, 64))
        assert not isinstance(caught.value, ExpertPackError)
        assert llm.n_tokens == 200
        assert (bits(llm) == expected).all()


def test_slow_reads_are_waited_for(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    with loaded(path) as llm:
        expected = evaluate(llm, [5])

    def slow(fd: int, buffer: memoryview, offset: int) -> int:
        time.sleep(2)
        return pread_into(fd, buffer, offset)

    with loaded(path) as llm, reads(llm, slow):
        assert (evaluate(llm, [5]) == expected).all()
        stats = llm.expert_stats()
    assert stats.wait_s > 1.9
    assert (stats.io_errors, stats.failures) == (0, 0)


# ---- through the rest of the API


def complete(llm: Any, prompt: list[int]) -> str:
    text: str = llm.create_completion(prompt, max_tokens=12, temperature=0)["choices"][0]["text"]
    return text


@pytest.mark.parametrize("name", ["qwen3moe-moe", "gpt-oss-moe", "qwen3next-moe"])
def test_completion(name: str, tmp_path: Path) -> None:
    """At whatever read a completion fails, the next one is what it would have been."""
    path = upstream_model(name, tmp_path)
    prompt = tokens_at(0, 20)
    with loaded(path, expert_cache=least(path)) as llm:
        expected = complete(llm, prompt)
    n_failed = 0
    for after in (0, 1, 2, 3, 4, 5, 6, 8, 12):
        with loaded(path, expert_cache=least(path)) as llm:
            with reads(llm, refused(errno.EIO), after=after) as broken:
                try:
                    assert complete(llm, prompt) == expected
                except ExpertPackError:
                    n_failed += 1
                else:
                    assert not broken
            assert complete(llm, prompt) == expected
    assert n_failed > 3


def test_a_cached_prompt_is_not_sampled_with_the_logits_of_a_failed_decode(tmp_path: Path) -> None:
    """llama_cpp samples at once if the whole prompt is evaluated; a decode that failed half-way has written others."""
    path = upstream_model("qwen3moe-moe", tmp_path)
    prompt = tokens_at(0, 20)
    options = {"expert_cache": least(path), "n_ubatch": 4}
    with loaded(path, **options) as llm:
        expected = complete(llm, prompt)
    n_failed = 0
    for after in range(0, 16, 2):
        with loaded(path, **options) as llm:
            llm.eval(prompt)
            with reads(llm, refused(errno.EIO), after=after):
                try:
                    llm.eval(tokens_at(50, 40))
                except ExpertPackError:
                    n_failed += 1
                    assert llm.n_tokens == len(prompt)
            if llm.n_tokens == len(prompt):
                assert complete(llm, prompt) == expected
    assert n_failed > 3


def test_embeddings(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    texts = ["one", "and another one", "three"]
    options = {"embedding": True, "logits_all": False, "expert_cache": least(path)}
    with loaded(path, **options) as llm:
        expected = llm.embed(texts)
    with loaded(path, **options) as llm:
        llm.eval(tokens_at(0, 5))
        with reads(llm, refused(errno.EIO)):
            assert "could not be read" in decode_error(lambda: llm.embed(texts))
        assert llm.n_tokens == 0, "embed() forgets what was evaluated, whether it succeeds or not"
        assert llm.embed(texts) == expected
        llm.eval(tokens_at(0, 5))


def test_a_state_saved_after_a_failure_is_whole(tmp_path: Path) -> None:
    path = upstream_model("qwen3next-moe", tmp_path)
    options = {"expert_cache": least(path)}
    with loaded(path, **options) as llm:
        expected = evaluate(llm, [9, 1, 6])
    with loaded(path, **options) as llm:
        evaluate(llm, [9, 1])
        with reads(llm, refused(errno.EIO)):
            decode_error(lambda: llm.eval(tokens_at(10, 6, llm.n_vocab())))
            decode_error(lambda: llm.save_state())
        state = llm.save_state()
        evaluate(llm, [20])
        llm.load_state(state)
        llm.eval(tokens_at(10, 6, llm.n_vocab()))
        assert (bits(llm) == expected).all()


@pytest.mark.parametrize("verify", ["first", "every"])
@pytest.mark.parametrize("direct_io", [True, False])
def test_a_damaged_pack_fails_the_decode_until_it_is_mended(verify: str, direct_io: bool, tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    pack = open_pack(find_pack(path))
    options = {"expert_cache": least(path), "expert_verify": verify, "expert_direct_io": direct_io}
    with loaded(path, **options) as llm:
        expected = evaluate(llm, BATCHES)
    flip_every_block(pack)
    with loaded(path, **options) as llm:
        text = decode_error(lambda: evaluate(llm, BATCHES[:1]))
        assert "checksum" in text and "\n" not in text
        flip_every_block(pack)
        assert np.array_equal(evaluate(llm, BATCHES), expected)
