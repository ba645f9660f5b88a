from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path

import pytest

from pypack.counters import Counter, Counters
from pypack.errors import UsageError
from pypack.stats_file import StatsWriter


def read(path: Path) -> dict[str, float]:
    stats: dict[str, float] = json.loads(path.read_text())
    return stats


def test_written_at_start_at_the_interval_and_at_close(tmp_path: Path) -> None:
    counters, path = Counters(), tmp_path / "stats.json"
    writer = StatsWriter(path, 0.01, counters.snapshot)
    assert read(path)["evictions"] == 0
    counters.add(Counter.EVICTIONS, 5)
    deadline = time.monotonic() + 30
    while read(path)["evictions"] != 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert read(path)["evictions"] == 5
    counters.add(Counter.EVICTIONS)
    writer.close()
    writer.close()
    assert read(path)["evictions"] == 6
    assert [entry.name for entry in tmp_path.iterdir()] == ["stats.json"]


def test_close_writes_even_if_the_interval_never_passes(tmp_path: Path) -> None:
    counters, path = Counters(), tmp_path / "stats.json"
    writer = StatsWriter(path, 1e6, counters.snapshot)
    counters.add(Counter.FALLBACKS)
    writer.close()
    assert read(path)["fallbacks"] == 1


@pytest.mark.parametrize("where", ["missing/stats.json", "."])
def test_a_bad_path_fails_at_start(tmp_path: Path, where: str) -> None:
    with pytest.raises(UsageError, match=r"statistics file cannot be written: .*folder that exists"):
        StatsWriter(tmp_path / where, 1, Counters().snapshot)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("interval_s", [0, -1, float("nan"), float("inf")])
def test_a_bad_interval_fails(tmp_path: Path, interval_s: float) -> None:
    with pytest.raises(UsageError, match="interval"):
        StatsWriter(tmp_path / "stats.json", interval_s, Counters().snapshot)


def test_a_later_failure_is_logged_and_harmless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    writer = StatsWriter(folder / "stats.json", 1e6, Counters().snapshot)
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING):
        writer.close()
    assert "could not be written" in caplog.text
