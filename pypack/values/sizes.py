"""Sizes in bytes, as users write and read them."""

from __future__ import annotations

import re
from typing import Any

from ..errors import UsageError
from .checks import shown

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
_SHOWN_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*|%)\s*", re.ASCII | re.IGNORECASE)


def parse_size(size: str | int | float, total_bytes: int, name: str = "the size", more: str = "") -> int:
    """Bytes meant by ``"20GiB"``, ``"1.5G"`` (= GiB), ``"20GB"`` (10^9), ``"60%"`` of the total, or a number.

    A number, with or without quotes, is a whole number of bytes. Raises :class:`UsageError`, which says ``name``, and ``more``
    that would do.
    """
    wrong = UsageError(
        f'{name} must be a size, such as "20GiB", "512MiB", "60%"{more} or a whole number of bytes, not {shown(size)}'
    )
    n_bytes: int | float
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in (*_UNITS, "%"):
            raise wrong
        number, unit = float(match[1]), match[2].lower()
        if unit == "%":
            if number > 100:
                raise UsageError(f"{name} is {shown(size)}, more than 100%")
            return int(total_bytes * number / 100)
        # through int where possible: a float cannot hold every byte count
        is_whole = match[1].isdecimal() and number < 1 << 63
        n_bytes = (int(match[1].lstrip("0") or "0") if is_whole else number) * _UNITS[unit]
    elif isinstance(size, bool) or not isinstance(size, int | float) or (isinstance(size, float) and size % 1 != 0):
        raise wrong
    else:
        n_bytes = size
    if not 0 <= n_bytes < 1 << 63:
        raise UsageError(f"{name} is {shown(size)}, out of range: a size is between 0 and 8 EiB")
    return int(n_bytes)


def is_auto(size: object) -> bool:
    """Whether the size is ``"auto"``, which leaves it to :mod:`..placement.budget`."""
    return isinstance(size, str) and size.strip().lower() == "auto"


def check_size(name: str, size: Any, or_auto: bool = False) -> Any:
    """The size as it was given; raises :class:`UsageError` like :func:`parse_size`."""
    if not (or_auto and is_auto(size)):
        parse_size(size, 0, name, ', "auto"' if or_auto else "")
    return size


def size_meaning(size: str | int | float) -> object:
    """What is equal for two sizes that mean the same of any total: ``"1GiB"`` and ``1 << 30``."""
    return "auto" if is_auto(size) else (parse_size(size, 0), parse_size(size, 1 << 53))


def size_text(n_bytes: int) -> str:
    """The size in the unit that fits, exactly: ``"1 KiB"``, ``"1610612736 bytes (1.5 GiB)"``."""
    for unit, size in _SHOWN_UNITS:
        if n_bytes >= size:
            exact = n_bytes % size == 0
            return f"{n_bytes // size} {unit}" if exact else f"{n_bytes} bytes ({n_bytes / size:.1f} {unit})"
    return f"{n_bytes} bytes"
