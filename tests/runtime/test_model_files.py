"""Models and packs that are no regular files or no longer fit each other are refused before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pypack.errors import ExpertPackError, ReadError, SourceMismatchError
from pypack.gguf_source import read_model
from pypack.pack import find_pack
from tests.runtime.packed import load, loaded, variant


@pytest.mark.timeout(60)
@pytest.mark.parametrize("of", [lambda path: path, find_pack, lambda path: Path(f"{find_pack(path)}.manifest.json")])
def test_a_fifo_is_not_waited_for(of: Callable[[Path], Path], tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    file = of(path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ReadError, match="it is a FIFO, not a regular file"):
        load(path)


def test_other_experts_in_the_same_model(tmp_path: Path) -> None:
    """Sizes, metadata, tensor table and trunk are those of before."""
    path = variant("type-Q4_K", tmp_path)
    tensor = read_model(path).tensors["blk.1.ffn_down_exps.weight"]
    data = path.read_bytes()
    at, half = tensor.offset, tensor.size_bytes // 2
    path.write_bytes(data[:at] + data[at + half : at + 2 * half] + data[at : at + half] + data[at + 2 * half :])
    with pytest.raises(SourceMismatchError, match=r"blk.1.ffn_down_exps.weight has other bytes.*--force"):
        load(path)
    path.write_bytes(data)
    with loaded(path) as llm:
        llm.eval([1, 2, 3])


def test_a_pack_with_a_path_that_no_file_can_have(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    for pack in ("", "a\0b"):
        with pytest.raises(ExpertPackError, match="path"):
            load(path, expert_pack=pack)
