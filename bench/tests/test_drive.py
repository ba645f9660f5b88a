"""The drive's benchmarks at one MiB, and without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.drive import native_rate, raw_rate
from bench.drive.programs import compiled
from lab.variants import VARIANTS
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import UsageError
from llama_expert_pack.pypack.format.pack import open_pack

SIZES = {"block_bytes": 1 << 20, "n_blocks": 3, "n_reads": 8, "stage_slots": 2, "read_splits": 2}


@pytest.mark.parametrize("hashed", [False, True])
def test_native_reads_beside_c_threads(tmp_path: Path, hashed: bool) -> None:
    found = native_rate.measure(tmp_path, 2, **SIZES, hashed=hashed)
    assert len(found["raw_gb_per_s"]) == len(found["native_gb_per_s"]) == 2
    assert found["native_to_raw"] > 0 and found["small_native_us"] > 0
    assert list(tmp_path.iterdir()) == []


def test_raw_rates_of_a_pack(tmp_path: Path) -> None:
    pack = open_pack(convert(VARIANTS["type-Q8_0"](tmp_path)).path)
    found = raw_rate.measure(pack, 64, 2, gpu=False)
    assert found["raw_bytes_per_s"] == max(found["raw_passes_bytes_per_s"]) > 0
    assert set(found["burst_s"]) == {str(k) for k in raw_rate.BURSTS}


def test_without_a_compiler_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"raw_read\.c .*install a compiler"):
        compiled("raw_read.c", tmp_path)
