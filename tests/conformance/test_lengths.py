"""Batches of all lengths are stock's, as long as both compute them in the same physical batches."""

from __future__ import annotations

import pytest

from lab.lengths import NAMES, runs_of_all_lengths
from lab.logits import Run, differences

SHARES = {"all": (1.0, 0.0), "half": (0.5, 0.0), "least": (0.0, 0.0)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return runs_of_all_lengths(tmp_path_factory.mktemp("lengths"), SHARES, n_threads=2, n_threads_batch=2)


@pytest.mark.parametrize("budget", SHARES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_identical(name: str, budget: str, runs: dict[str, Run]) -> None:
    ours = runs[f"{name}.{budget}"]
    assert differences(runs[f"{name}.stock"], ours) == ""
    assert ours.stats["loads"] > 0, "no expert came from the pack"
