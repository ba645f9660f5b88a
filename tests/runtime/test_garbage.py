"""Garbage is held back in a decode, not for as long as other threads decode."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from llama_expert_pack.bridge import garbage


class Cycle:
    n_alive = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.n_alive += 1

    def __del__(self) -> None:
        Cycle.n_alive -= 1


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    gc.collect()
    Cycle.n_alive = 0
    yield
    gc.collect()


def leave_behind(n: int) -> None:
    for _ in range(n):
        Cycle()


def test_nothing_is_collected_inside() -> None:
    with garbage.held_back():
        leave_behind(5000)
        with garbage.held_back():
            pass
        assert Cycle.n_alive == 5000
    leave_behind(5000)
    assert Cycle.n_alive < 5000, "Python collects by itself again"


@pytest.mark.parametrize("may_collect", [True, False])
def test_a_thread_collects_though_another_is_always_inside(may_collect: bool) -> None:
    leave, entered = threading.Event(), threading.Event()

    def stay() -> None:
        with garbage.held_back():
            entered.set()
            leave.wait(60)

    other = threading.Thread(target=stay)
    other.start()
    try:
        assert entered.wait(60)
        most = 0
        for _ in range(50):
            with garbage.held_back(may_collect=may_collect):
                leave_behind(1000)
            most = max(most, Cycle.n_alive)
        assert (most < 10_000) == may_collect
    finally:
        leave.set()
        other.join()
