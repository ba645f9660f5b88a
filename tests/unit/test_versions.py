"""docs/VERSIONS.md and CHANGELOG.md say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from llama_expert_pack import __version__
from llama_expert_pack.pypack.format import header
from llama_expert_pack.pypack.trace import format as trace_format

ROOT = Path(__file__).parents[2]


def number_in(name: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / name).read_text())
    assert found is not None, f"{name} has no {pattern}"
    return found[1]


def test_the_page_has_the_numbers_of_today() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([\d., ]+) \|", (ROOT / "docs/VERSIONS.md").read_text(), re.MULTILINE)
    assert {name.split(",")[0]: number for name, number in rows} == {
        "package": __version__,
        "pack format": str(header.VERSION),
        "trace format": str(trace_format.VERSION),
        "provider ABI": number_in("native/include/expert_provider.h", r"define EXPERT_ABI_VERSION (\d+)"),
        "llama-cpp-python": number_in("pyproject.toml", r'"llama-cpp-python==([\d.]+)"'),
        "GGUF": "2, 3",
    }


def test_the_changelog_begins_with_what_comes_and_has_this_version() -> None:
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert titles[0] == "Unreleased" and __version__ in titles
