from __future__ import annotations

from pathlib import Path

import pytest

from pypack.errors import UsageError
from pypack.plain_text import checked_path, shown


def test_shown_is_one_line_that_a_terminal_takes_for_text() -> None:
    assert shown("Ärger 日本 a b") == "Ärger 日本 a b"
    assert shown("\x1b[2J\n\r\u202e\x9b\udcff") == r"\x1b[2J\n\r\u202e\x9b\udcff"
    assert shown(Path("a\tb")) == r"a\tb"


def test_paths() -> None:
    assert checked_path("x", Path("a/b")) == checked_path("x", b"a/b") == checked_path("x", "a/b") == "a/b"
    for path, message in (
        ("", "x is an empty path"),
        ("a\0b", "x is .*holds a zero byte"),
        (5, "x must be a path, not 5"),
        ("a\ud800", "x is .*no file can be named"),
    ):
        with pytest.raises(UsageError, match=message):
            checked_path("x", path)  # type: ignore[arg-type]
