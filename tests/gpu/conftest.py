"""Everything here needs an NVIDIA GPU and a CUDA build (`make CUDA=1 build stock`); without them it is skipped."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from llama_expert_pack.bridge.library import build_info

HERE = Path(__file__).parent


def _missing() -> str:
    if not build_info()["cuda"]:
        return "the native part was built without CUDA"
    if shutil.which("nvidia-smi") is None or subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode:
        return "there is no NVIDIA GPU"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = _missing()
    for item in items:
        if why and HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.skip(reason=why))
