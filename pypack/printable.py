"""Text from outside, made safe to print: names in a file may hold what a terminal obeys."""

from __future__ import annotations

_MAX_CHARS = 4000  # a name in a GGUF may have 64 MiB


def printable(text: object) -> str:
    """The text in one line: control, format and other invisible characters as escapes, too much of it left out."""
    text = str(text)
    if len(text) > _MAX_CHARS:
        text = f"{text[: _MAX_CHARS // 2]} ... {text[-_MAX_CHARS // 2 :]}"
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(c: str) -> str:
    if c.isprintable():
        return c
    if "\udc80" <= c <= "\udcff":  # a byte of a file name that is no UTF-8
        return f"\\x{ord(c) - 0xDC00:02x}"
    return c.encode("unicode_escape").decode()
