"""What users give, for messages and for checks: values of any kind and length, names that are no text."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError

_SHOWN_MAX = 60
_DIGITS_MAX = 18  # what fits 63 bits for sure; int() itself refuses thousands


def shown(value: object) -> str:
    """The value for a message: as Python writes it, cut where it is long."""
    # more than some thousand digits can't be written in decimal
    is_huge = isinstance(value, int) and value.bit_length() > 8 * _SHOWN_MAX
    text = f"{value:#x}" if is_huge else repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX // 2]}... ({len(text)} characters)"


def as_number(text: str) -> Any:
    """The whole number that the text is, else the text: :func:`check_count` refuses that."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX else text


def as_seconds(text: str) -> Any:
    """The number that the text is, else the text: :func:`check_seconds` refuses that."""
    try:
        return float(text)
    except ValueError:
        return text


def check_count(name: str, value: object, least: int, most: int) -> int:
    """The value; raises :class:`UsageError` if it is no whole number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{name} must be a whole number from {least} to {most}, not {shown(value)}")
    return value


def check_seconds(name: str, value: Any) -> float:
    """The value; raises :class:`UsageError` if it is no time that can be waited for."""
    with contextlib.suppress(TypeError, OverflowError):
        if math.isfinite(value) and value > 0:
            return value  # type: ignore[no-any-return]
    raise UsageError(f"{name} must be a number of seconds above 0, not {shown(value)}")


def check_switch(name: str, value: Any) -> bool:
    """The value; raises :class:`UsageError` if it is neither True nor False."""
    if value not in (True, False):
        raise UsageError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    """The value; raises :class:`UsageError` if it is none of the choices."""
    if value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}")
    return value


def check_path(name: str, path: object) -> str:
    """The path; raises :class:`UsageError` if no file can have it: it is empty, has a NUL, or is no path at all."""
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
        usable = b"\0" not in os.fsencode(text) and text != ""
    except TypeError:
        raise UsageError(f"{name} must be the path of a file, not {shown(path)}") from None
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise UsageError(f"{name} must be the path of a file, not {shown(text)}: give one, or leave it out")
    return text
