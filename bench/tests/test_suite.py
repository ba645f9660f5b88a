"""Upstream's own server tests, the files that take seconds: what passes with stock passes with ours, without and with a pack."""

from __future__ import annotations

import pytest

from bench.serving.launchers import KINDS
from bench.serving.suite import FAST_FILES, Outcomes, lost, prepare, run_launcher, table

pytestmark = pytest.mark.timeout(2400)  # three runs of the files


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcomes]:
    workspace = prepare(tmp_path_factory.mktemp("upstream"))
    found: dict[str, Outcomes] = {}
    for kind in KINDS:
        found[kind] = run_launcher(workspace, kind, FAST_FILES, n_jobs=2, stock=found.get("stock"))
    print(table(found))
    return found


def test_the_suite_is_alive(results: dict[str, Outcomes]) -> None:
    assert len(results["stock"]["passed"]) >= 100


@pytest.mark.parametrize("kind", ["ours", "packed"])
def test_what_passes_with_stock_passes(results: dict[str, Outcomes], kind: str) -> None:
    assert lost(results)[kind] == []


def test_a_lost_test_is_found() -> None:
    stock: Outcomes = {"passed": ["a", "b"], "failed": ["c"], "skipped": []}
    broken: Outcomes = {"passed": ["b", "c"], "failed": ["a"], "skipped": []}
    assert lost({"stock": stock, "ours": broken}) == {"ours": ["a"]}
