"""A stopped conversion goes on where it was, unless something has changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from llama_expert_pack.pypack.convert import assemble, journal
from llama_expert_pack.pypack.convert.partial_pack import PartialPack
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.errors import PackError, SourceMismatchError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.system.guard import Guard
from tests.gguf_bytes import tiny_moe
from tests.unit.convert.models import FINISHED, files_of, names, run


class Stopped(BaseException):
    """Raised in place of a signal."""


def stop_after_layers(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = journal.write_atomically
    written = []

    def write(path: Path, data: bytes, guard: Guard) -> None:
        real(path, data, guard)
        written.append(path)
        if len(written) == n:
            raise Stopped

    monkeypatch.setattr(import_module("llama_expert_pack.pypack.convert.convert"), "write_atomically", write)


@pytest.fixture
def stopped(model: Path) -> Iterator[Path]:
    """A model whose conversion was stopped after two of four layers."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after_layers(2, patch)
        with pytest.raises(Stopped):
            run(model)
    assert names(model.parent) == {
        "model.gguf",
        "model.expert-pack.partial",
        "model.expert-pack.partial.json",
    }
    yield model


def test_resume(stopped: Path, reference: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished layers are not read or written again."""
    offsets = []
    real = PartialPack.write_blocks

    def write_blocks(self: PartialPack, data: assemble.Bytes, offset: int) -> None:
        offsets.append(offset)
        real(self, data, offset)

    monkeypatch.setattr(PartialPack, "write_blocks", write_blocks)
    result = run(stopped, jobs=1)
    assert result.resumed_layers == 2
    assert min(offsets) == open_pack(result.path).layers[2].data_offset
    assert files_of(result.path) == reference
    assert names(stopped.parent) == FINISHED


def test_layers_may_share_a_checkpoint(
    model: Path, reference: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two layers get none of their own; the third makes all three safe."""
    clock = iter([0.0, 1.0, 4.9, 5.0, 5.0, *[9.0] * 9])
    module = import_module("llama_expert_pack.pypack.convert.convert")
    monkeypatch.setattr(module, "CHECKPOINT_INTERVAL_S", 5.0)
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "monotonic", lambda: next(clock))
        stop_after_layers(1, patch)
        with pytest.raises(Stopped):
            run(model, jobs=1)
    result = run(model)
    assert result.resumed_layers == 3
    assert files_of(result.path) == reference


def test_partial_pack_is_no_pack(stopped: Path) -> None:
    with pytest.raises(PackError, match="unfinished pack"):
        open_pack(stopped.with_name("model.expert-pack.partial"))


def touch(model: Path) -> None:
    os.utime(model, ns=(1, 1))


def change_expert(model: Path) -> None:
    data = bytearray(model.read_bytes())
    data[-1000] ^= 1
    model.write_bytes(data)


def other_model(model: Path) -> None:
    tiny_moe().write(model)


@pytest.mark.parametrize("change", [touch, change_expert, other_model])
def test_changed_model_is_not_resumed(change: Callable[[Path], None], stopped: Path) -> None:
    before = names(stopped.parent)
    change(stopped)
    with pytest.raises(SourceMismatchError, match=r"the model has changed since; use --restart"):
        run(stopped)
    assert names(stopped.parent) == before
    result = run(stopped, restart=True)
    assert result.resumed_layers == 0
    verify(result.path, deep=True, source=stopped)


def test_changed_package_is_not_resumed(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("llama_expert_pack.pypack.convert.convert"), "BUILDER", "another builder")
    with pytest.raises(SourceMismatchError, match=r"options or this package have changed since; use --restart"):
        run(stopped)


def cut_partial(model: Path) -> None:
    os.truncate(model.with_name("model.expert-pack.partial"), 100_000)


def zero_partial_index(model: Path) -> None:
    with open(model.with_name("model.expert-pack.partial"), "r+b") as file:
        file.seek(4096)
        file.write(bytes(400))


def spoil_journal(text: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        model.with_name("model.expert-pack.partial.json").write_text(text)

    change.__name__ = f"spoil_journal_{len(text)}"
    return change


def promise_more(model: Path) -> None:
    path = model.with_name("model.expert-pack.partial.json")
    path.write_text(path.read_text().replace('"layers_done":2', '"layers_done":3'))


def promise_far_more(model: Path) -> None:
    path = model.with_name("model.expert-pack.partial.json")
    path.write_text(path.read_text().replace('"layers_done":2', '"layers_done":99'))


@pytest.mark.parametrize(
    "damage",
    [
        cut_partial,
        zero_partial_index,
        spoil_journal(""),
        spoil_journal("{}"),
        spoil_journal("[[["),
        promise_more,
        promise_far_more,
    ],
)
def test_damaged_remains_are_not_resumed(
    damage: Callable[[Path], None], stopped: Path, reference: tuple[bytes, bytes]
) -> None:
    damage(stopped)
    with pytest.raises(PackError, match=r"damaged.*--restart"):
        run(stopped)
    os.utime(stopped)
    result = run(stopped, restart=True)
    assert result.resumed_layers == 0
    assert files_of(result.path) == reference


def test_journal_without_partial_pack(stopped: Path, reference: tuple[bytes, bytes]) -> None:
    stopped.with_name("model.expert-pack.partial").unlink()
    result = run(stopped)
    assert result.resumed_layers == 0
    assert files_of(result.path) == reference


def test_partial_pack_without_journal(stopped: Path, reference: tuple[bytes, bytes]) -> None:
    """Nothing is known about it, so nothing of it is used."""
    partial = stopped.with_name("model.expert-pack.partial")
    stopped.with_name("model.expert-pack.partial.json").unlink()
    partial.write_bytes(b"\xff" * 50_000_000)
    result = run(stopped)
    assert result.resumed_layers == 0
    assert files_of(result.path) == reference


def test_stopped_before_the_manifest(
    model: Path, reference: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renamed but without a manifest: not a pack yet, but all that is missing is the manifest."""
    with monkeypatch.context() as patch:
        patch.setattr(
            import_module("llama_expert_pack.pypack.convert.convert"),
            "_write_manifest",
            lambda *_: (_ for _ in ()).throw(Stopped),
        )
        with pytest.raises(Stopped):
            run(model)
    path = model.with_name("model.expert-pack")
    with pytest.raises(PackError, match="has no manifest"):
        open_pack(path)
    assert run(model).reused
    assert files_of(path) == reference
    assert names(model.parent) == FINISHED
