"""What the operating system says about files, as one sentence."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ReadError


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
