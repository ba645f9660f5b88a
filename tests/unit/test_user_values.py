"""What users give: shown, checked, and read from text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llama_expert_pack.pypack.errors import UsageError
from llama_expert_pack.pypack.values.checks import as_number, check_count, check_path, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), ("x", "'x'"), (-(10**5000), "-0x"), ("9" * 5000, "'999"), (["a" * 100], "['aaa"), (1 << 400, "2582")],
    ids=range(6),
)
def test_shown(value: object, text: str) -> None:
    assert shown(value).startswith(text)
    assert len(shown(value)) < 100


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("12", 12), ("007", 7), ("1" * 18, int("1" * 18))])
def test_numbers_in_text(text: str, number: int) -> None:
    assert as_number(text) == number


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", " 1", "1_0", "٣", "²", "9" * 19, "9" * 5000])
def test_text_that_is_no_number_stays(text: str) -> None:
    assert as_number(text) == text
    with pytest.raises(UsageError, match=r"^--slots must be a whole number from 1 to 9, not '"):
        check_count("--slots", as_number(text), 1, 9)


@pytest.mark.parametrize("value", [0, 10, -(2**31), 2**31, 10**5000, 2.0, True, None, "3"], ids=range(9))
def test_wrong_counts(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^slots must be a whole number from 1 to 9, not "):
        check_count("slots", value, 1, 9)


def test_right_counts() -> None:
    assert [check_count("slots", n, 1, 9) for n in (1, 9)] == [1, 9]


@pytest.mark.parametrize("path", ["", "\0", "a\0b", b"", b"a\0", "a\ud800", 5, 2.5, None, ["a"]])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(UsageError, match=r"^expert_trace must be the path of a file, not ") as caught:
        check_path("expert_trace", path)
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize("path", ["a", b"a", Path("a"), os.fsdecode(b"\xff")])
def test_paths(path: Any) -> None:
    assert check_path("expert_trace", path) == os.fsdecode(path)
