"""native/llama_source.py: what it refuses, and that it leaves alone what did not change."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "native" / "llama_source.py"
FILES = {"a.c": b"one\ntwo\nthree\n", "sub/b.c": b"x\n", "models/vocab.gguf": b"\0"}
PATCH = """\
--- a/a.c
+++ b/a.c
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with a tiny archive of its own in an empty cache."""
    spec = importlib.util.spec_from_file_location("llama_source", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "llama-expert-pack").mkdir(parents=True)
    pin_archive(module, {**FILES, ".git": b"gitdir: elsewhere"}, monkeypatch)
    return module


def pin_archive(module: ModuleType, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts an archive with these files into the cache and pins it."""
    archive = Path(os.environ["XDG_CACHE_HOME"]) / "llama-expert-pack" / module.archive_name(module.VERSION)
    with tarfile.open(archive, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"llama_cpp_python-{module.VERSION}/vendor/llama.cpp/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    monkeypatch.setattr(module, "SHA256", module.digest(archive))


def write_patch(folder: Path, text: str = PATCH) -> list[Path]:
    path = folder / "0001.patch"
    path.write_text(text)
    return [path]


def test_unpacks_without_network_and_patches(source: ModuleType, tmp_path: Path) -> None:
    source.prepare(tmp_path / "tree", write_patch(tmp_path))
    assert (tmp_path / "tree/a.c").read_bytes() == b"one\nTWO\nthree\n"
    assert (tmp_path / "tree/sub/b.c").read_bytes() == FILES["sub/b.c"]
    assert not (tmp_path / "tree/.git").exists()


def test_patches_apply_inside_another_repository(source: ModuleType, tmp_path: Path) -> None:
    """git must not take the tree for a part of the repository around it and skip its files."""
    (tmp_path / ".git").mkdir()
    source.prepare(tmp_path / "build/tree", write_patch(tmp_path))
    assert b"TWO" in (tmp_path / "build/tree/a.c").read_bytes()


def test_only_files_that_change_are_written_again(source: ModuleType, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    source.prepare(tree, [])
    for path in (tree / "a.c", tree / "sub/b.c"):
        os.utime(path, (1, 1))
    source.prepare(tree, write_patch(tmp_path))
    assert (tree / "a.c").stat().st_mtime > 1 and (tree / "sub/b.c").stat().st_mtime == 1
    os.utime(tree / "a.c", (2, 2))
    source.prepare(tree, write_patch(tmp_path))
    assert (tree / "a.c").stat().st_mtime == 2


def test_nothing_of_another_version_stays(source: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was built from it is older than every file, however old those are in the archive."""
    tree = tmp_path / "tree"
    source.prepare(tree, write_patch(tmp_path))
    built = time.time()
    pin_archive(source, {"a.c": FILES["a.c"], "c.c": b"y\n"}, monkeypatch)
    source.prepare(tree, write_patch(tmp_path))
    assert {path.name for path in tree.iterdir()} == {"a.c", "c.c", ".expert-pack-source"}
    assert b"TWO" in (tree / "a.c").read_bytes()
    assert min(path.stat().st_mtime for path in tree.iterdir()) >= built


def test_a_patch_that_does_not_apply_names_file_and_hunk(source: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(source.SourceError, match=r"0001\.patch.*does not apply.*a\.c:1"):
        source.prepare(tmp_path / "tree", write_patch(tmp_path, PATCH.replace("-two", "-2")))
    assert not (tmp_path / "tree").exists()


def test_a_wrong_archive_is_refused(source: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "SHA256", "0" * 64)
    with pytest.raises(source.SourceError, match=r"expected sha256 0{64}, found [0-9a-f]{64}: delete the file"):
        source.prepare(tmp_path / "tree", [])


def test_no_network_and_no_archive_is_one_line(
    source: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setattr(sys, "argv", ["llama_source.py"])
    assert source.main() == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: the source") and "put the file into" in lines[0]
    assert not list((tmp_path / "empty/llama-expert-pack").iterdir())
