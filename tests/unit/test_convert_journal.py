"""What a journal or a partial pack may claim: a lie is refused, and nothing is published that does not open."""

from __future__ import annotations

import hashlib
import os
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from llama_expert_pack.pypack.convert import journal
from llama_expert_pack.pypack.convert.pack_output import PackOutput
from llama_expert_pack.pypack.convert.partial_pack import PartialPack
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.errors import GGUFError, PackError, SourceMismatchError
from llama_expert_pack.pypack.format.header import Index
from llama_expert_pack.pypack.format.manifest import canonical_sha256
from llama_expert_pack.pypack.gguf.model import read_model
from llama_expert_pack.pypack.source.discover import find_layers
from tests.unit.convert.models import mixed, names, run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return mixed().write(tmp_path / "model.gguf")


def forge(model: Path, layers_done: int, index: bytes) -> None:
    """A partial pack of the right size with this index, and a journal with all hashes right."""
    module = import_module("llama_expert_pack.pypack.convert.convert")
    found = read_model(model)
    plan = module._make_plan(found, find_layers(found), PackOutput(found, None))
    partial = model.with_name("model.expert-pack.partial")
    with open(partial, "wb") as file:
        file.truncate(plan.files[0].size_bytes)
        file.seek(4096)
        file.write(index)
    sha256 = hashlib.sha256(index).hexdigest()
    claim = journal.Journal(
        journal.FORMAT, canonical_sha256(plan).hex(), module._source_stamp(found), layers_done, sha256
    )
    partial.with_name("model.expert-pack.partial.json").write_bytes(msgspec.json.encode(claim))


@pytest.mark.parametrize(
    ("layers_done", "n_entries"), [(4, 55), (5, 0), (5, 55), (99, 0), (1 << 62, 0), ((1 << 64) - 1, 55), (1, 40)]
)
def test_a_journal_that_claims_too_much(layers_done: int, n_entries: int, model: Path) -> None:
    """Finished layers whose index entries are zeros, and more layers than there are."""
    forge(model, layers_done, bytes(40 * n_entries))
    with pytest.raises(PackError, match=r"is damaged and cannot be resumed: use --restart"):
        run(model)
    assert not model.with_name("model.expert-pack").exists()
    run(model, restart=True)


def test_a_journal_with_places_and_digests_but_other_blocks(model: Path) -> None:
    """The index of the finished pack, and blocks of zeros: what a disk that lost its writes would leave."""
    pack = run(model).path
    index = pack.read_bytes()[4096 : 4096 + 40 * 55]
    pack.unlink()
    forge(model, 4, index)
    with pytest.raises(SourceMismatchError, match=r"cannot be resumed.*blk.0.ffn_gate_exps.weight.*--restart"):
        run(model)


def test_nothing_is_published_that_would_not_open(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index on the disk is not what was written there."""
    real = PartialPack.write_index

    def write_index(self: PartialPack, entries: Index, first_key: int) -> None:
        real(self, entries, first_key)
        os.pwrite(self._fd, b"\xff", 4096)

    with monkeypatch.context() as patch:
        patch.setattr(PartialPack, "write_index", write_index)
        with pytest.raises(PackError, match=r"is damaged and cannot be finished: use --restart.*index is damaged"):
            run(model)
    assert not model.with_name("model.expert-pack").exists()
    verify(run(model, restart=True).path, deep=True, source=model)


def test_a_manifest_that_no_reader_would_take_is_found_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("llama_expert_pack.pypack.format.manifest"), "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(GGUFError, match=r"cannot be packed, .* its manifest is larger than 1000 bytes"):
        run(model)
    assert names(model.parent) == {"model.gguf"}
