"""Who is told how far a conversion or a verification is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how many bytes are done; ``start`` once, ``advance`` often, ``close`` at the end."""

    def start(self, total_bytes: int, done_bytes: int) -> None: ...
    def advance(self, n_bytes: int) -> None: ...
    def close(self) -> None: ...


class Silent:
    """Progress for library use: none."""

    def start(self, total_bytes: int, done_bytes: int) -> None: ...
    def advance(self, n_bytes: int) -> None: ...
    def close(self) -> None: ...
