"""Text from outside, made fit for a terminal: file names and what files say of themselves may hold control characters."""

from __future__ import annotations

import os

from pypack.errors import UsageError

__all__ = ["checked_path", "shown"]


def shown(text: object) -> str:
    """The text on one line; what can't be printed is written as an escape, ``\\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def checked_path(name: str, path: str | os.PathLike[str]) -> str:
    """The path that option ``name`` gives. Raises :class:`UsageError` if no file can have it."""
    try:
        text = os.fsdecode(path)
        os.fsencode(text)
    except TypeError:
        raise UsageError(f"{name} must be a path, not {path!r}") from None
    except UnicodeEncodeError:
        raise UsageError(f"{name} is {path!r}, which no file can be named: give another path") from None
    if not text:
        raise UsageError(f"{name} is an empty path: give a file, or leave the option out")
    if "\0" in text:
        raise UsageError(f"{name} is {shown(text)!r}, which no file can be named: it holds a zero byte")
    return text
