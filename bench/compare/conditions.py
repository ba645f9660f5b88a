"""The conditions that both sides of a comparison run under: a cold page cache and a small read-ahead.

What needs root says so in a sentence; nothing is done halfway in silence.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from bench.banner import block_queues

Cold = Literal["machine", "files", "off"]


def drop_caches(paths: Iterable[Path], how: Cold) -> None:
    """Takes the files out of the page cache; "machine" also empties the whole page cache, which needs root."""
    if how == "off":
        return
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if how == "machine":
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def cold_sentence(how: Cold) -> str:
    """What was done so that nothing is in the page cache."""
    return {
        "machine": "page cache dropped before each side (whole machine)",
        "files": "page cache of the model and the pack dropped before each side (posix_fadvise)",
        "off": "page cache left as it was: NOT cold",
    }[how]


@contextmanager
def read_ahead(paths: Iterable[Path], size_kb: int) -> Iterator[str]:
    """Sets the read-ahead of the files' drives and puts it back; yields what was done, as a sentence."""
    before: dict[Path, str] = {}
    problem = ""
    for file in dict.fromkeys(queue / "read_ahead_kb" for path in paths for queue in block_queues(path)):
        try:
            old = file.read_text().strip()
            file.write_text(str(size_kb))
            before[file] = old
        except OSError as error:
            problem = (
                f"read-ahead could not be set ({error.strerror}: run as root) and is {_read(file) or 'unknown'} KB"
            )
    try:
        if problem:
            yield problem
        elif before:
            yield f"read-ahead {size_kb} KB (was {', '.join(sorted(set(before.values())))})"
        else:
            yield "read-ahead unknown: no block device is behind this file system"
    finally:
        for file, old in before.items():
            file.write_text(old)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
