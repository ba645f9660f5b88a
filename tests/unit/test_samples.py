"""Experts that change while sizes, metadata and trunk stay are noticed by whoever checks that a pack fits its model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.errors import ExpertPackError, ReadError, SourceMismatchError
from llama_expert_pack.pypack.format.pack import Pack, open_pack
from llama_expert_pack.pypack.gguf.model import read_model
from llama_expert_pack.pypack.source import samples
from llama_expert_pack.pypack.source.discover import find_layers
from llama_expert_pack.pypack.source.match import check_source
from tests.gguf_bytes import GGUF, facts, moe_tensors, split, tiny_moe
from tests.pack_tools import manifest_of, resign


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Layers of several sizes and types, one with a single expert; shares from a few bytes to over a sample."""
    tensors = [
        *moe_tensors(0, n_expert=9),
        *moe_tensors(1, n_expert=1, n_embd=32, n_ff=8),
        *moe_tensors(4, n_expert=3, n_embd=256, n_ff=256, types=(8, 8, 1)),
    ]
    return GGUF(facts(), tensors).write(tmp_path / "model.gguf")


@pytest.fixture
def pack(model: Path) -> Pack:
    return open_pack(convert(model, safety_margin_bytes=0).path)


def swap_halves(model: Path, name: str) -> None:
    """As another upload would: every byte may be another, all else is the same, the time of change too."""
    before = model.stat()
    tensor = read_model(model).tensors[name]
    path = read_model(model).shards[tensor.file_id].path
    data = bytearray(path.read_bytes())
    half = tensor.size_bytes // 2
    place = data[tensor.offset : tensor.offset + 2 * half]
    data[tensor.offset : tensor.offset + 2 * half] = place[half:] + place[:half]
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def expert_tensors(model: Path) -> list[str]:
    return [role.tensor for layer in find_layers(read_model(model)) for role in layer.roles]


def test_any_expert_tensor_that_changes_is_named(model: Path, pack: Pack) -> None:
    """By check_source, by verify, and by a second conversion."""
    checks: list[Callable[[], object]] = [
        lambda: check_source(pack, model),
        lambda: verify(pack.path, source=model),
        lambda: convert(model, safety_margin_bytes=0),
    ]
    tensors = expert_tensors(model)
    assert len(tensors) == 9
    for name in tensors:
        swap_halves(model, name)
        for check in checks:
            with pytest.raises(SourceMismatchError, match=rf"expert \d of {name} has other bytes.*--force"):
                check()
        swap_halves(model, name)
        for check in checks:
            check()


def test_force_makes_the_pack_of_the_new_experts(model: Path, pack: Pack) -> None:
    swap_halves(model, "blk.0.ffn_up_exps.weight")
    assert not convert(model, safety_margin_bytes=0, force=True).reused
    verify(pack.path, deep=True, source=model)


def test_a_pack_with_other_bytes_is_noticed_too(model: Path, pack: Pack) -> None:
    """Blocks damaged on the way, with a header, an index and a manifest that are right."""
    with open(pack.path, "r+b") as file:
        file.seek(pack.layers[2].data_offset)
        file.write(b"\xff" * 4096)
    with pytest.raises(SourceMismatchError, match=r"expert 0 of blk.4.ffn_gate_exps.weight has other bytes"):
        check_source(pack, model)


def test_shards(tmp_path: Path) -> None:
    paths = split(tiny_moe(), [1, 3, 5], tmp_path)
    pack = open_pack(convert(paths[0], safety_margin_bytes=0).path)
    check_source(pack, paths[0])
    for name in expert_tensors(paths[0]):
        swap_halves(paths[0], name)
        with pytest.raises(SourceMismatchError, match=name):
            check_source(pack, paths[0])
        swap_halves(paths[0], name)


def test_samples_are_few_and_in_bounds() -> None:
    for n_expert in range(1, 300):
        for role_bytes in (1, 4095, 4096, 4097, 100_000):
            found = list(samples._samples(n_expert, role_bytes))
            assert len(found) == min(n_expert, 4) == len({expert for expert, _, _ in found})
            assert {0, n_expert - 1} <= {expert for expert, _, _ in found}
            assert all(start >= 0 and n_bytes <= 4096 and start + n_bytes <= role_bytes for _, start, n_bytes in found)
            assert found[0][1] == 0
            assert n_expert == 1 or found[-1][1] + found[-1][2] == role_bytes


def test_nothing_but_the_samples_is_read(model: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by this process nor ahead of it."""
    n_bytes: list[int] = []
    advice: list[tuple[int, int]] = []
    usual_pread, usual_fadvise = os.pread, os.posix_fadvise

    def pread(fd: int, n: int, offset: int) -> bytes:
        n_bytes.append(n)
        return usual_pread(fd, n, offset)

    def fadvise(fd: int, at: int, n: int, what: int) -> None:
        advice.append((n, what))
        usual_fadvise(fd, at, n, what)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        patch.setattr(os, "posix_fadvise", fadvise)
        found = read_model(model)
        n_bytes.clear()
        assert samples.expert_difference(found, pack.layers, pack.path) is None
    assert sum(n_bytes) <= 2 * 4 * 4096 * 9
    assert [n for n, what in advice if what == os.POSIX_FADV_RANDOM] == [0, 0]
    assert sum(n for n, what in advice if what == os.POSIX_FADV_WILLNEED) == sum(n_bytes)


def test_other_layers_with_the_hashes_of_the_model(model: Path, tmp_path: Path) -> None:
    """A manifest that names the model rightly and describes other tensors."""
    other = GGUF(facts(), moe_tensors(7)).write(tmp_path / "other.gguf")
    path = convert(other, safety_margin_bytes=0).path
    source = json.loads(manifest_of(convert(model, safety_margin_bytes=0).path).read_text())["source"]
    resign(path, manifest=lambda manifest: manifest.update(source=source))
    with pytest.raises(SourceMismatchError, match="its layers are not those of the model"):
        check_source(open_pack(path), model)


class Stopped(BaseException):
    pass


def stop_after_two_layers(model: Path) -> None:
    module = import_module("llama_expert_pack.pypack.convert.convert")
    with pytest.MonkeyPatch.context() as patch:
        real, written = module.write_atomically, []

        def write(*args: object) -> None:
            real(*args)
            written.append(args)
            if len(written) == 2:
                raise Stopped

        patch.setattr(module, "CHECKPOINT_INTERVAL_S", 0)
        patch.setattr(module, "write_atomically", write)
        with pytest.raises(Stopped):
            convert(model, jobs=1, safety_margin_bytes=0)


def test_a_resumed_conversion_does_not_mix_old_and_new_experts(model: Path) -> None:
    """The file's size and its time of change are those of before."""
    stop_after_two_layers(model)
    swap_halves(model, "blk.1.ffn_gate_exps.weight")
    with pytest.raises(SourceMismatchError, match=r"cannot be resumed.*blk.1.ffn_gate_exps.weight.*use --restart"):
        convert(model, safety_margin_bytes=0)
    path = convert(model, safety_margin_bytes=0, restart=True).path
    verify(path, deep=True, source=model)


def test_experts_that_change_during_the_conversion(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_expert_pack.pypack.convert.partial_pack import PartialPack

    real = PartialPack.sync

    def sync(self: PartialPack) -> None:
        real(self)
        swap_halves(model, "blk.0.ffn_up_exps.weight")

    monkeypatch.setattr(PartialPack, "sync", sync)
    with pytest.raises(SourceMismatchError, match="changed while it was converted: use --restart"):
        convert(model, safety_margin_bytes=0)
    assert not model.with_name("model.expert-pack").exists()


def test_read_errors_are_sentences(model: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int, n: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    found = read_model(model)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failing)
        with pytest.raises(ReadError, match=r"model.gguf cannot be read at byte \d+: Input/output error"):
            samples.expert_difference(found, pack.layers, pack.path)
    os.truncate(model, 10_000)
    with pytest.raises(ExpertPackError, match="was cut short while it was read"):
        samples.expert_difference(found, pack.layers, pack.path)
