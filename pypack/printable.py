"""Text from outside, made safe to print: names in a file may hold what a terminal obeys."""

from __future__ import annotations

__all__ = ["printable"]

_MAX_CHARS = 4000  # a name in a GGUF may have 64 MiB


def printable(text: str) -> str:
    """The text in one line: control, format and other invisible characters as escapes, too much of it left out."""
    if len(text) > _MAX_CHARS:
        text = f"{text[: _MAX_CHARS // 2]} ... {text[-_MAX_CHARS // 2 :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
