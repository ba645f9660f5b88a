"""As tests/runtime/test_trust.py, with the experts in VRAM: what is dropped leaves the device's table too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.test_trust import lie_while_open, overwrite_while_open

# "lookup": single tokens and small batches run as captured graphs; "segments": as on a GPU with a display
WAYS = {"lookup": "0", "segments": "1"}


@pytest.mark.parametrize("way", WAYS)
def test_a_pack_that_is_overwritten_while_open(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERT_PACK_CUDA_KERNEL_TIMEOUT", WAYS[way])
    overwrite_while_open(tmp_path, n_gpu_layers=-1, expert_ram=0)


@pytest.mark.parametrize("way", WAYS)
def test_a_drive_that_begins_to_lie(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERT_PACK_CUDA_KERNEL_TIMEOUT", WAYS[way])
    lie_while_open(tmp_path, n_gpu_layers=-1, expert_ram=0)
