"""Paths from outside, and what the operating system says about them: each ends in one sentence."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pypack.errors import ReadError, UsageError

__all__ = ["checked_path", "os_errors"]


def checked_path(path: str | os.PathLike[str], what: str) -> Path:
    """The path of ``what``. Raises UsageError for one that no file can have."""
    try:
        data = os.fsencode(path)
    except UnicodeEncodeError:
        data = b"\0"
    if not data:
        raise UsageError(f"the path of the {what} is empty: give that of a file")
    if b"\0" in data:
        raise UsageError(f"the path of the {what} is {os.fspath(path)!r}, which no file can have: check the path")
    return Path(path)


@contextmanager
def os_errors(path: Path) -> Generator[None, None, None]:
    """Turns OSErrors into ReadErrors: files may vanish, or change their rights, at any moment.

    ``path``: what the sentence names if the error names nothing.
    """
    try:
        yield
    except OSError as error:
        where = path if error.filename is None else os.fsdecode(error.filename)
        raise ReadError(
            f"{where} cannot be used: {error.strerror or error}; give a file that may be read and stays as it is",
            error.errno or 0,
        ) from error
