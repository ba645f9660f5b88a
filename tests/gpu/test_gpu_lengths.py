"""As tests/conformance/test_lengths.py, with the experts in VRAM, and in host memory beside it."""

from __future__ import annotations

import pytest

from lab.lengths import NAMES, runs_of_all_lengths
from lab.logits import Run, differences

SHARES = {
    "all": (1.0, 0.0),
    "most": (0.75, 0.0),
    "least": (0.0, 0.0),
    "half+some": (0.5, 0.25),
    "least+rest": (0.0, 1.0),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return runs_of_all_lengths(tmp_path_factory.mktemp("lengths"), SHARES, n_gpu_layers=-1)


@pytest.mark.parametrize("budget", SHARES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_identical(name: str, budget: str, runs: dict[str, Run]) -> None:
    ours = runs[f"{name}.{budget}"]
    assert differences(runs[f"{name}.stock"], ours) == ""
    assert ours.stats["loads"] > 0, "no expert came from the pack"
