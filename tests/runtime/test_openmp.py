"""How long idle threads of a computation spin: what libgomp itself says when it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = "import os, llama_expert_pack; llama_expert_pack.Llama; print('left:', os.environ.get('GOMP_SPINCOUNT'))"


def spin_of(**given: str) -> tuple[str, str]:
    """What libgomp took, and what is left in the environment for programs that the process starts."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **given}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    (taken,) = (line.split("'")[1] for line in run.stderr.splitlines() if "GOMP_SPINCOUNT" in line)
    (left,) = (line.removeprefix("left: ") for line in run.stdout.splitlines() if line.startswith("left: "))
    return taken, left


def test_threads_spin_for_less_than_by_default() -> None:
    assert spin_of() == ("40000", "None")


@pytest.mark.parametrize("given", [{"GOMP_SPINCOUNT": "123"}, {"OMP_WAIT_POLICY": "passive"}])
def test_what_the_user_says_holds(given: dict[str, str]) -> None:
    taken, left = spin_of(**given)
    assert taken != "40000" and left == given.get("GOMP_SPINCOUNT", "None")
