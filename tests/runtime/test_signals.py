"""Ctrl-C and other signals: none gets lost, nothing breaks, and a batch that takes long ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lab.logits import minimum_budget
from lab.stock import ROOT, environment
from llama_expert_pack.pypack.drive.direct_io import pread_into
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from tests.books import wrong_books
from tests.runtime.packed import (
    bits,
    evaluate,
    loaded,
    provider_of,
    reads,
    tokens_at,
    upstream_model,
    variant,
)

BATCHES = [20, 1, 1]


def least(path: Path) -> int:
    return minimum_budget(open_pack(find_pack(path)))


def test_ctrl_c_always_arrives_and_breaks_nothing(tmp_path: Path) -> None:
    """Interrupted at any moment, also in the callbacks of the main thread, an evaluation can be repeated."""
    for name in ("qwen3moe-moe", "qwen3next-moe"):
        path = upstream_model(name, tmp_path)
        options = {"expert_cache": least(path), "expert_stage_slots": 1, "expert_read_splits": 1, "n_batch": 8}
        with loaded(path, **options) as llm:
            expected = evaluate(llm, [20, 3, 1])

        def slow(fd: int, buffer: memoryview, offset: int) -> int:
            time.sleep(0.003)
            return pread_into(fd, buffer, offset)

        with loaded(path, **options) as llm, reads(llm, slow):
            n_arrived = 0
            for n in (20, 3, 1):
                tokens = tokens_at(llm.n_tokens, n, llm.n_vocab())
                n_before = llm.n_tokens
                for delay_ms in range(1, 20):
                    pest = threading.Timer(delay_ms / 1000, os.kill, (os.getpid(), signal.SIGINT))
                    try:
                        pest.start()
                        llm.eval(tokens)
                        pest.join()
                        time.sleep(0.01)
                    except KeyboardInterrupt:
                        n_arrived += 1
                    pest.join()
                    llm._roll_back(n_before)
                llm.eval(tokens)
            assert n_arrived == 3 * 19, "a Ctrl-C got lost"
            assert (bits(llm) == expected).all()
            assert wrong_books(provider_of(llm).cache) == []


def test_ctrl_c_ends_a_batch_between_two_layers(tmp_path: Path) -> None:
    """Not after minutes, when it has been computed; what was evaluated before stays."""
    path = variant("dense-between", tmp_path)  # several layers
    options = {"expert_cache": least(path), "expert_stage_slots": 1, "expert_read_splits": 1}
    n_reads = 0

    def interrupting(fd: int, buffer: memoryview, offset: int) -> int:
        nonlocal n_reads
        n_reads += 1
        if n_reads == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return pread_into(fd, buffer, offset)

    with loaded(path, **options) as llm:
        expected = evaluate(llm, [8, 30])
    with loaded(path, **options) as llm:
        evaluate(llm, [8])
        before = llm.expert_stats()
        with reads(llm, interrupting), pytest.raises(KeyboardInterrupt):
            evaluate(llm, [30])
        done = llm.expert_stats().since(before)
        assert done.failures == 1 and done.acquires < len(open_pack(find_pack(path)).layers)
        assert llm.n_tokens == 8
        assert (evaluate(llm, [30]) == expected).all()


def test_a_handler_that_goes_on_ends_nothing(tmp_path: Path) -> None:
    path = variant("many-experts", tmp_path)
    came = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with loaded(path, expert_cache=least(path)) as llm:
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
            evaluate(llm, [60, 60, 60])
            assert llm.expert_stats().failures == 0
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until = time.monotonic() + 10
    while not came and time.monotonic() < wait_until:
        time.sleep(0.01)
    assert came == [signal.SIGINT]


GENERATE = """
import sys
from llama_expert_pack import Llama
llm = Llama(sys.argv[1], expert_pack=True, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
try:
    print("generating", flush=True)
    while True:
        llm.create_completion([1, 2, 3], max_tokens=100)
        llm.reset()
except KeyboardInterrupt:
    text = llm.create_completion([1, 2, 3], max_tokens=3)["choices"][0]["text"]
    llm.close()
    print("interrupted", bool(text))
"""


def test_ctrl_c_ends_generation(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GENERATE, str(variant("many-experts", tmp_path))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment(stock=False), cwd=ROOT)  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "generating\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "interrupted True\n"), errors


def test_handlers_are_given_back(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    came: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        handlers = [signal.getsignal(number) for number in numbers]
        path = variant("type-Q4_K", tmp_path)

        def noisy(fd: int, buffer: memoryview, offset: int) -> int:
            os.kill(os.getpid(), signal.SIGUSR1)
            return pread_into(fd, buffer, offset)

        with loaded(path) as llm, reads(llm, noisy):
            evaluate(llm, BATCHES)
        assert came and set(came) == {signal.SIGUSR1}
        assert [signal.getsignal(number) for number in numbers] == handlers
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_statistics_survive_an_interrupted_process(tmp_path: Path) -> None:
    """The file is whole at any moment: a process killed in the middle leaves valid JSON."""
    path, stats = variant("type-Q4_K", tmp_path), tmp_path / "stats.json"
    code = (
        "import sys\nfrom llama_expert_pack import Llama\nllm = Llama(sys.argv[1], expert_pack=True, n_threads=1,"
        " n_threads_batch=1, verbose=False, expert_stats_path=sys.argv[2], expert_stats_interval=0.001)\n"
        "print('up', flush=True)\nwhile True: llm.reset(); llm.eval([1, 2, 3])\n"
    )
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code, str(path), str(stats)], stdout=subprocess.PIPE,
                                   env=environment(stock=False), cwd=ROOT, text=True)  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        time.sleep(0.1)
        process.kill()
        process.communicate()
        assert json.loads(stats.read_text())["acquires"] >= 0
