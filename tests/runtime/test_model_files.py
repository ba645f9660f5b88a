"""Models and packs that are no regular files or no longer fit each other are refused before anything is loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.make_model import make_model
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.errors import ExpertPackError, GGUFError, ReadError, SourceMismatchError
from llama_expert_pack.pypack.gguf.model import read_model
from llama_expert_pack.pypack.source.match import find_pack
from tests.runtime.packed import bits, load, loaded, variant
from tests.runtime.test_bytes import expert_ranges


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


@pytest.mark.skipif(shutil.which("fallocate") is None, reason="fallocate (util-linux) is not there")
def test_experts_that_were_punched_out_of_the_model_are_not_missed(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m.gguf", "qwen3moe", n_layer=2, n_expert=8, n_embd=256, n_ff_exp=512, type="Q8_0")
    convert(path)
    with loaded(path) as llm:
        llm.eval([1, 2, 3])
        expected = bits(llm)
    for file, offset, length in expert_ranges(path):
        place = ["--offset", str(offset), "--length", str(length)]
        if subprocess.run(["fallocate", "--punch-hole", *place, str(file)], check=False).returncode:
            pytest.skip("the file system punches no holes")
    with loaded(path) as llm:
        llm.eval([1, 2, 3])
        assert (bits(llm) == expected).all()
    pack = find_pack(path)
    before = pack.read_bytes()
    with pytest.raises(SourceMismatchError, match=r"has a hole at byte \d+, in blk\.0\..*keep it"):
        verify(pack, deep=True, source=path)
    verify(pack, deep=True)
    for output in (None, tmp_path / "other.expert-pack"):
        with pytest.raises(GGUFError, match=r"has a hole at byte \d+, in blk\.0\..*convert a whole copy"):
            convert(path, output, force=True)
    assert pack.read_bytes() == before and not (tmp_path / "other.expert-pack").exists()
    for file, offset, length in expert_ranges(path):
        with file.open("r+b") as zeroed:
            zeroed.seek(offset)
            zeroed.write(bytes(length))
    with pytest.raises(SourceMismatchError, match="has other bytes"):  # zeros that somebody wrote
        load(path)


def test_a_pack_with_a_path_that_no_file_can_have(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    for pack in ("", "a\0b"):
        with pytest.raises(ExpertPackError, match="path"):
            load(path, expert_pack=pack)
