"""Work in threads comes back in order, and no thread outlives the loop."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import closing

import pytest

from llama_expert_pack.pypack.convert import workers
from llama_expert_pack.pypack.convert.assemble import Chunk
from llama_expert_pack.pypack.convert.workers import DEFAULT_JOBS, check_jobs, jobs_for, map_in_order
from llama_expert_pack.pypack.errors import UsageError
from llama_expert_pack.pypack.format.layout import Layer

LAYER = Layer(0, 0, "exps", 100, 0, 4096, ())
CHUNKS = [Chunk(LAYER, i, 1) for i in range(100)]


def test_order_and_threads() -> None:
    threads = set()

    def work(chunk: Chunk) -> int:
        threads.add(threading.get_ident())
        time.sleep(0.001 * (chunk.first_expert % 5))
        return chunk.first_expert * 2

    done = list(map_in_order(work, CHUNKS, 4, threading.Event()))
    assert done == [(chunk, 2 * i) for i, chunk in enumerate(CHUNKS)]
    assert 1 < len(threads) <= 4


def test_few_chunks_are_queued() -> None:
    """A model of any size is not planned ahead as a whole."""
    taken = []

    def chunks() -> object:
        for chunk in CHUNKS:
            taken.append(chunk)
            yield chunk

    with closing(map_in_order(lambda _: None, chunks(), 2, threading.Event())) as results:  # type: ignore[arg-type]
        next(results)
        assert len(taken) <= 10


def test_first_error_in_order_is_raised_and_the_rest_stopped() -> None:
    stop = threading.Event()
    finished = []

    def work(chunk: Chunk) -> None:
        if chunk.first_expert >= 3:
            raise ValueError(str(chunk.first_expert))
        finished.append(chunk)

    with pytest.raises(ValueError, match="3"), closing(map_in_order(work, CHUNKS, 4, stop)) as results:
        for _ in results:
            pass
    assert stop.is_set()
    assert len(finished) == 3


@pytest.mark.parametrize("n_interrupts", [1, 3])
def test_interrupts_wait_for_running_work(n_interrupts: int) -> None:
    """However often Ctrl-C is pressed, what the work uses is not taken from under it."""
    running = threading.Event()
    go_on = threading.Event()
    stop = threading.Event()
    in_use = [0]

    def work(chunk: Chunk) -> None:
        in_use[0] += 1
        running.set()
        go_on.wait()
        in_use[0] -= 1

    def interrupt() -> None:
        running.wait()
        for _ in range(n_interrupts):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.05)
        go_on.set()

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt), closing(map_in_order(work, CHUNKS, 1, stop)) as results:
        for _ in results:
            pass
    assert in_use == [0]
    assert stop.is_set()
    helper.join()


def test_jobs_that_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at least, whatever there is; a number that was given stays."""
    mib = 1 << 20
    found = {n: jobs_for(n * mib) for n in (0, 100, 135, 150, 200, 300, 352, 400, 1 << 20)}
    assert found == {0: 1, 100: 1, 135: 1, 150: 1, 200: 1, 300: 3, 352: 4, 400: 4, 1 << 20: 4}
    monkeypatch.setattr(workers, "host_memory_free", lambda: 100 * mib)
    assert (check_jobs(None), check_jobs(6)) == (1, 6)
    for wrong in (0, -1, 7):
        with pytest.raises(UsageError, match="choose 1 to 6"):
            check_jobs(wrong)


def test_jobs_where_nothing_is_known_about_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> int:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    monkeypatch.setattr(workers, "host_memory_free", unknown)
    assert check_jobs(None) == DEFAULT_JOBS
