"""A pytest plugin for upstream's server tests: writes each test's outcome to $SERVER_SUITE_OUTCOMES, one JSON line a test.

The models are in the cache already, so the suite's start of every preset to download them is left out.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "SERVER_SUITE_OUTCOMES"


def pytest_collection_finish(session: Any) -> None:
    importlib.import_module("utils").ServerPreset.load_all = staticmethod(lambda: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> Generator[None, Any, Any]:
    item.phases = []
    result = yield
    outcome = "failed" if "failed" in item.phases else "skipped" if "skipped" in item.phases else "passed"
    with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": item.nodeid, "outcome": outcome}) + "\n")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    report = yield
    item.phases.append(report.outcome)
    return report
