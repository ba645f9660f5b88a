"""Imports point down the rooms, as docs/ARCHITECTURE.md draws them: a room knows those before it, never those after."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# each room of pypack, and the rooms that it may know; all know the files on pypack's own floor
KNOWS = {
    "values": "",
    "system": "",
    "gguf": "values system",
    "format": "values system",
    "source": "values system gguf format",
    "stats": "values system",
    "drive": "values system format stats",
    "policy": "values",
    "placement": "values format stats policy",
    "trace": "values system format policy placement",
    "replay": "values system format stats policy placement trace",
    "convert": "values system gguf format source drive",
    "command": "values system gguf format source drive stats policy placement trace replay convert",
}
FLOOR = {"errors", "printable", "ggml_types", "_version"}
PRODUCT = {"llama_expert_pack", "pypack", "bridge"}
# what the trees at the top level may import of each other
MAY_IMPORT = {
    "pypack": {"pypack"},
    "bridge": PRODUCT,
    "lab": {"lab", *PRODUCT},
    "bench": {"bench", "lab", *PRODUCT},
    "tests": {"tests", "lab", *PRODUCT},
}


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """What the file imports, as paths from the repository's root: ("pypack", "format", "layout")."""
    here = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = () if node.level == 0 else ("llama_expert_pack", *here)[: len(here) + 2 - node.level]
            module = (*base, *(node.module or "").split(".")) if node.module else base
            for alias in node.names:
                yield _from_root((*module, alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield _from_root(tuple(alias.name.split(".")))


def _from_root(module: tuple[str, ...]) -> tuple[str, ...]:
    return module[1:] if module[:1] == ("llama_expert_pack",) and module[1:2] in (("pypack",), ("bridge",)) else module


def files(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


def room_of(module: tuple[str, ...]) -> str:
    return module[1] if len(module) > 1 else ""


@pytest.mark.parametrize("room", KNOWS)
def test_a_room_knows_only_those_below(room: str) -> None:
    allowed = {room, *KNOWS[room].split(), *FLOOR}
    found = files(f"pypack/{room}")
    assert found
    wrong = [
        f"{path.relative_to(ROOT)} imports {'.'.join(module)}"
        for path in found
        for module in imports(path)
        if module[0] in PRODUCT and (module[0] != "pypack" or room_of(module) not in allowed)
    ]
    assert wrong == []


def test_there_is_no_circle_and_every_room_is_drawn() -> None:
    order = list(KNOWS)
    for room, known in KNOWS.items():
        assert all(order.index(other) < order.index(room) for other in known.split()), room
    assert {path.parent.name for path in files("pypack")} == {*KNOWS, "pypack"}
    assert {path.stem for path in (ROOT / "pypack").glob("*.py")} == {*FLOOR, "__init__"}
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    drawn = {room: known.replace(",", "") for room, known in re.findall(r"^\| `(\w+)` \| .* \| (.*)\|$", page, re.M)}
    assert {room: known.strip() for room, known in drawn.items() if room in KNOWS} == {**KNOWS, "command": "all"}


def test_the_floor_knows_nobody_above() -> None:
    for name in FLOOR:
        for module in imports(ROOT / "pypack" / f"{name}.py"):
            assert module[0] not in PRODUCT or room_of(module) in FLOOR, (name, module)


@pytest.mark.parametrize("top", MAY_IMPORT)
def test_trees_keep_apart(top: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {'.'.join(module)}"
        for path in files(top)
        for module in imports(path)
        if module[0] in {"llama_expert_pack", *MAY_IMPORT} - MAY_IMPORT[top]
    ]
    assert wrong == []


def test_every_room_says_what_belongs_there() -> None:
    for top in ("pypack", "bridge", "lab", "bench"):
        for path in files(top):
            if path.name == "__init__.py":
                assert ast.get_docstring(ast.parse(path.read_text())), path


FILE_LINES_MAX, FUNCTION_LINES_MAX = 400, 60


def long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno >= FUNCTION_LINES_MAX:
                yield f"{path.relative_to(ROOT)} {node.name}"


def test_no_file_is_long_and_functions_fit_a_screen() -> None:
    found = [path for top in (*MAY_IMPORT, "native", "llama_expert_pack") for path in files(top)]
    assert [path for path in found if len(path.read_text().splitlines()) > FILE_LINES_MAX] == []
    assert [name for path in found for name in long_functions(path)] == []


def test_native_rooms_include_only_what_their_table_says() -> None:
    source = ROOT / "native" / "src"
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*)\|$", (source / "README.md").read_text(), re.MULTILINE)
    may_include = {room: {room, *re.findall(r"\w+", known)} for room, known in rows}
    assert set(may_include) == {path.name for path in source.iterdir() if path.is_dir()}
    room_of_header = {path.name: path.parent.name for path in source.rglob("*.h")}
    wrong = [
        f"{path.relative_to(source)} includes {header}"
        for path in source.glob("*/*")
        for header in re.findall(r'#include "(\w+\.h)"', path.read_text())
        if header in room_of_header and room_of_header[header] not in may_include[path.parent.name]
    ]
    assert wrong == []
    order = list(may_include)
    assert all(order.index(other) <= order.index(room) for room, known in may_include.items() for other in known)
