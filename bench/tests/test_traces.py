"""The program that makes the tables of docs/POLICY.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.traces import tables
from bench.traces.synthetic import Habits, synthetic_trace


def test_the_same_habits_give_the_same_trace() -> None:
    habits = Habits(n_layers=2, n_experts=16, top_k=2, n_tokens=300)
    first, again = synthetic_trace(habits), synthetic_trace(habits)
    assert np.array_equal(first.ids, again.ids) and len(first.ids) == 2 * 2 * 300
    assert not np.array_equal(first.ids, synthetic_trace(habits, seed=2).ids)


LITTLE = Habits(n_layers=2, n_experts=16, top_k=2, n_tokens=50)


def test_stored_and_made_up_traces_have_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PRESETS", {"little": LITTLE})
    found = {recorded.name: (recorded.group, len(recorded.trace.layers)) for recorded in tables.all_traces()}
    assert found["sample"] == ("trained", 8) and found["k3"] == ("random weights", 6)
    assert found["little"] == ("made up", 2)


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "GROUPS", {})
    monkeypatch.setattr(tables, "PRESETS", {"little": LITTLE, "other": LITTLE})
    done = CliRunner().invoke(tables.main, ["--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert [line for line in done.stdout.splitlines() if line[:3] == "###"] == ["### little", "### other", "### All"]
    assert "| policy | share of the possible hits | made up |" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"little.svg", "other.svg", "results.jsonl"}
