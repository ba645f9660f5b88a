"""Models and packs that are no regular files end the server at once, with a sentence."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.server.serving import SMALL, run_to_end


@pytest.mark.timeout(60)
@pytest.mark.parametrize("suffix", [".gguf", ".expert-pack", ".expert-pack.manifest.json"])
def test_a_fifo_is_not_waited_for(suffix: str, tmp_path: Path, model: Path) -> None:
    for other in (".gguf", ".expert-pack", ".expert-pack.manifest.json"):
        if other == suffix:
            os.mkfifo(tmp_path / f"a{suffix}")
        else:
            shutil.copy(model.with_suffix(other), tmp_path / f"a{other}")
    run = run_to_end(["-m", str(tmp_path / "a.gguf"), *SMALL, "--expert-pack", "auto"])
    assert run.returncode == 1
    assert "it is a FIFO, not a regular file" in run.stderr
