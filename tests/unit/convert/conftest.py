from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.unit.convert.models import files_of, mixed, run


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    model = mixed().write(tmp_path_factory.mktemp("reference") / "model.gguf")
    return files_of(run(model).path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return mixed().write(tmp_path / "model.gguf")


@pytest.fixture(autouse=True)
def checkpoint_after_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("llama_expert_pack.pypack.convert.convert"), "CHECKPOINT_INTERVAL_S", 0)
