"""As tests/runtime/test_fork.py, with the parent's model on the GPU, which does not follow into a child."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.test_fork import CHILDREN, run


@pytest.mark.parametrize("body", CHILDREN.values(), ids=CHILDREN)
def test_a_child(body: str, tmp_path: Path) -> None:
    run(f"assert (status := child({body})) == 0, status\n", tmp_path, n_gpu_layers=99)
