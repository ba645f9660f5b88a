"""What the documentation points at exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("native/**/*.md")]
)
TREES = r"(?:pypack|bridge|bench|lab|tests|native|docs|llama_expert_pack)"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_paths_in_the_documentation_exist(page: Path) -> None:
    text = (ROOT / page).read_text()
    named = set(re.findall(rf"(?<![\w/.-])({TREES}(?:/[\w.-]+)+)(?![\w*])", text))
    modules = set(re.findall(r"python -m ((?:bench|lab|llama_expert_pack)[\w.]*\w)", text))
    named |= {module.replace(".", "/") for module in modules}
    gone = [
        name
        for name in sorted(named)
        if not any((ROOT / f"{name.rstrip('.')}{end}").exists() for end in ("", ".py", ".cpp", ".h", "/__main__.py"))
    ]
    assert gone == []


@pytest.mark.parametrize("page", ["docs/ARCHITECTURE.md", "docs/VERSIONS.md", "CONTRIBUTING.md"])
def test_names_in_the_documentation_exist(page: str) -> None:
    """What is quoted and has an underscore is the name of something, or of a file."""
    files = [
        file for tree in ("pypack", "bridge", "native", "lab", "bench", "tests") for file in (ROOT / tree).rglob("*.*")
    ]
    kinds = (".py", ".h", ".cpp", ".cu", ".patch", ".cmake", ".txt")
    text = "".join(file.read_text() for file in files if file.suffix in kinds and file != Path(__file__))
    quoted = " ".join(re.findall(r"`([^`\n]+)`", (ROOT / page).read_text()))
    names = set(re.findall(r"\w*[a-zA-Z]_\w+", quoted)) - {file.stem for file in files}
    assert sorted(name for name in names if name not in text) == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_in_the_documentation_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page.parent / link).exists()] == []
