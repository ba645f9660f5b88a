"""Verification finds every changed byte and every other model."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_expert_pack.pypack.convert import assemble
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.errors import PackError, SourceMismatchError, UsageError
from tests.gguf_bytes import GGUF, facts, moe_tensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = [*moe_tensors(0, n_expert=9), *moe_tensors(4, n_expert=3, n_embd=256, n_ff=256, types=(8, 8, 1))]
    return GGUF(facts(), tensors).write(tmp_path / "model.gguf")


@pytest.fixture
def pack(model: Path) -> Path:
    return convert(model, safety_margin_bytes=0).path


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def test_what_is_checked(pack: Path, model: Path) -> None:
    assert str(verify(pack)) == "2 layers, 12 experts, structure checked, blocks not read"
    size = pack.stat().st_size - 8192
    assert str(verify(pack, deep=True)) == f"2 layers, 12 experts, {size} bytes hashed"
    assert str(verify(pack, deep=True, source=model)).endswith("bytes hashed, made from the given model")


@pytest.mark.parametrize("piece_bytes", [8192, 1 << 20])
@pytest.mark.parametrize(
    ("place", "where"),
    [
        (8192, "expert 0 of layer 0 (blk.0)"),
        (8192 + 5 * 32768 + 30000, "expert 5 of layer 0 (blk.0)"),  # padding counts too
        (8192 + 9 * 32768, "expert 0 of layer 1 (blk.4)"),
        (-1, "expert 2 of layer 1 (blk.4)"),
    ],
)
def test_changed_byte(place: int, where: str, piece_bytes: int, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "PIECE_BYTES", piece_bytes)
    flip(pack, place % pack.stat().st_size)
    verify(pack)
    with pytest.raises(PackError) as caught:
        verify(pack, deep=True)
    assert f"{pack}: {where} is damaged" in str(caught.value)


def test_expert_changed_in_the_model(pack: Path, model: Path) -> None:
    """A single byte between the samples: only the deep comparison can see it."""
    flip(model, model.stat().st_size - 10_000)
    verify(pack, source=model)
    with pytest.raises(SourceMismatchError, match=r"expert 2 of layer 1 \(blk.4\) differs from that in"):
        verify(pack, deep=True, source=model)


def test_other_model(pack: Path, tmp_path: Path) -> None:
    other = GGUF(facts(), moe_tensors(0)).write(tmp_path / "other.gguf")
    with pytest.raises(SourceMismatchError, match="does not belong to"):
        verify(pack, source=other)


def test_wrong_jobs(pack: Path) -> None:
    with pytest.raises(UsageError, match="choose 1 to"):
        verify(pack, deep=True, jobs=0)
