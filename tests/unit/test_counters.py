from __future__ import annotations

import re
import threading
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from llama_expert_pack.pypack.stats.counters import Counter, Counters, ExpertStats

HEADER = Path(__file__).parents[2] / "native/include/expert_provider.h"


def test_layout_is_the_one_of_the_header() -> None:
    body = re.search(r"enum expert_counter \{(.*?)\};", HEADER.read_text(), re.DOTALL)
    assert body is not None
    entries = re.findall(r"^\s*EXPERT_(\w+)\s*(= 0)?,?", body[1], re.MULTILINE)
    names = [name for name, _ in entries]
    assert names.pop() == "COUNTERS"
    assert names == [counter.name for counter in sorted(Counter)]
    assert [int(counter) for counter in sorted(Counter)] == list(range(len(names)))
    assert [field.name.upper() for field in fields(ExpertStats)] == names
    assert len(Counters().array) == len(names)


def test_snapshot_reads_every_counter_at_its_place() -> None:
    counters = Counters()
    counters.array[:] = range(1, len(Counter) + 1)
    stats = counters.snapshot()
    for counter in Counter:
        assert getattr(stats, counter.name.lower()) == counter + 1
    assert stats.hit_rate == 2 / 5
    assert stats.read_bytes_per_acquire == 6.0
    assert stats.wait_s == 9e-9
    assert stats.to_dict()["hit_rate"] == 0.4
    assert all(type(value) in (int, float) for value in stats.to_dict().values())
    with pytest.raises(FrozenInstanceError):
        stats.hits = 0  # type: ignore[misc]


def test_nothing_counted_divides_by_nothing() -> None:
    stats = Counters().snapshot()
    assert stats.hit_rate == 0.0
    assert stats.read_bytes_per_acquire == 0.0


def test_since_is_the_difference() -> None:
    counters = Counters()
    counters.add(Counter.READ_BYTES, 10)
    before = counters.snapshot()
    counters.add(Counter.READ_BYTES, 32)
    counters.add(Counter.EVICTIONS)
    difference = counters.snapshot().since(before)
    assert (difference.read_bytes, difference.evictions, difference.hits) == (32, 1, 0)


def test_no_addition_is_lost_between_threads() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(2000):
            counters.add(Counter.IO_ERRORS)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot().io_errors == 16_000
