"""What is printed of names from outside."""

from __future__ import annotations

import os
from pathlib import Path

from llama_expert_pack.pypack.printable import printable


def test_one_line_that_a_terminal_takes_for_text() -> None:
    assert printable("Ärger 日本 a b") == "Ärger 日本 a b"
    assert printable("\x1b[2J\n\r\u202e\x9b\ud800") == r"\x1b[2J\n\r\u202e\x9b\ud800"
    assert printable(os.fsdecode("ä".encode() + b"\xff.gguf")) == "ä\\xff.gguf"
    assert printable(Path("a\tb")) == r"a\tb"


def test_a_name_of_any_length_fits_a_message() -> None:
    assert len(printable("\x1b" * (1 << 20))) < 20_000
