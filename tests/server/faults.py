"""What the tests and the faulty server agree on."""

from __future__ import annotations

from pathlib import Path


def waiting_file(fault_file: Path) -> Path:
    """Exists since a read waited."""
    return fault_file.with_suffix(".waiting")
