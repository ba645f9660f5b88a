"""The C and C++ programs of this folder: compiled where they are wanted, as building llama.cpp needed a compiler, too."""

from __future__ import annotations

import subprocess
from pathlib import Path

from llama_expert_pack.pypack.errors import UsageError

_COMPILERS = {".c": "cc", ".cpp": "c++"}


def compiled(source: str, folder: Path, *options: str) -> Path:
    """The program of that file, in ``folder``. Raises UsageError without a compiler."""
    path = Path(__file__).with_name(source)
    program = folder / path.stem
    compiler = _COMPILERS[path.suffix]
    try:
        subprocess.run([compiler, "-O2", "-pthread", str(path), *options, "-o", str(program)], check=True)
    except FileNotFoundError:
        raise UsageError(
            f"{source} measures the drive and must be compiled: install a compiler as `{compiler}`"
        ) from None
    return program


def output(program: Path, *arguments: object) -> list[float]:
    """The numbers that it prints, one a line."""
    run = subprocess.run([str(program), *map(str, arguments)], check=True, capture_output=True, text=True)
    return [float(line) for line in run.stdout.split()]
