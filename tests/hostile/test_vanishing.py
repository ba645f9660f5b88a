"""Files that vanish at any moment of a check or a conversion: it goes on without them, or says so in one sentence."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_expert_pack.pypack.command.inspect import describe
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.errors import ExpertPackError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import check_source
from tests.gguf_bytes import tiny_moe

CALLS = ("open", "stat", "lstat", "fstat", "pread", "preadv", "statvfs", "access", "pathconf", "posix_fadvise")


class Vanishing:
    """Moves a file away at the n-th system call that opens, asks or reads."""

    def __init__(self, path: Path, at_call: int, patch: pytest.MonkeyPatch) -> None:
        self.path, self.left = path, at_call
        for name in CALLS:
            patch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self.left -= 1
            if self.left == 0:
                with contextlib.suppress(FileNotFoundError):
                    self.path.replace(f"{self.path}.gone")
            return function(*args, **kwargs)

        return call


def pack_of(model: Path) -> Path:
    return model.with_name("model.expert-pack")


WORK: dict[str, Callable[[Path], object]] = {
    "convert": lambda model: convert(model, jobs=1, safety_margin_bytes=0),
    "force": lambda model: convert(model, jobs=1, safety_margin_bytes=0, force=True),
    "verify": lambda model: verify(pack_of(model), deep=True, source=model, jobs=1),
    "check-source": lambda model: check_source(open_pack(pack_of(model)), model),
    "inspect": lambda model: describe(model),
    "inspect-pack": lambda model: describe(pack_of(model)),
}


@pytest.mark.parametrize("what", ["model.gguf", "model.expert-pack", "model.expert-pack.manifest.json"])
@pytest.mark.parametrize("name", WORK)
def test_files_that_vanish(name: str, what: str, tmp_path: Path) -> None:
    good, folder = tmp_path / "good", tmp_path / "folder"
    good.mkdir()
    convert(tiny_moe(n_block=1, n_expert=2).write(good / "model.gguf"), safety_margin_bytes=0)
    n_refused = call = 0
    while True:
        call += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        with pytest.MonkeyPatch.context() as patch:
            vanishing = Vanishing(folder / what, call, patch)
            try:
                WORK[name](folder / "model.gguf")
            except ExpertPackError as error:
                n_refused += 1
                assert "\n" not in str(error)
        if vanishing.left > 0:
            break
    assert call > 3
    is_needed = what == "model.gguf" if name in ("convert", "force") else (what == "model.gguf") is (name == "inspect")
    assert n_refused > 0 or not is_needed
