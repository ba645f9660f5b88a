"""native/upgrade.py on made-up sources: what merges and is written, what does not fit and is told, what is refused."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
LINES = [f"line {i}\n" for i in range(1, 21)]
BACKEND = """\
from pathlib import Path
def prepare_metadata_for_build_wheel(folder, settings=None):
    text = Path("PKG-INFO").read_text()
    name = "llama_cpp_python-" + text.split()[-1] + ".dist-info"
    (Path(folder) / name).mkdir()
    (Path(folder) / name / "METADATA").write_text(text)
    return name
"""
FIRST = """\
Why this patch is there.

diff --git a/a.c b/a.c
--- a/a.c
+++ b/a.c
@@ -4,3 +4,4 @@
 line 4
-line 5
+line five
+line five and a half
 line 6
@@ -15,2 +16,3 @@
 line 15
+new line
 line 16
"""
SECOND = """\
--- a/a.c
+++ b/a.c
@@ -5,3 +5,2 @@
 line five
-line five and a half
 line 6
"""
PATCHED = [*LINES[:4], "line five\n", *LINES[5:15], "new line\n", *LINES[15:]]


class Clone:
    """A repository with these two scripts and patches, a package index, and a cache with the pinned source 1.0."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder / "clone", folder / "index" / "llama-cpp-python"
        self.cache = folder / "cache" / "llama-expert-pack"
        (self.folder / "native" / "patches").mkdir(parents=True)
        self.index.mkdir(parents=True)
        self.cache.mkdir(parents=True)
        self.environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(self.cache.parent),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.index.parent.as_uri(),
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "PIP_RETRIES": "0",
        }
        for script in ("llama_source.py", "upgrade.py"):
            shutil.copy(NATIVE / script, self.folder / "native")
        shutil.copy(NATIVE.parent / ".gitignore", self.folder)
        pinned = self.publish("1.0", {"a.c": LINES})
        shutil.copy(self.index / "llama_cpp_python-1.0.tar.gz", self.cache)
        self.project.write_text(f'    "llama-cpp-python==1.0",\n\n[tool.llama-source]\nsha256 = "{pinned}"\n')
        self.patch("0001-first.patch").write_text(FIRST)
        self.patch("0002-second.patch").write_text(SECOND)
        self.git("init", "--quiet")
        self.commit()

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "--quiet", "--message", "x")

    @property
    def project(self) -> Path:
        return self.folder / "pyproject.toml"

    def patch(self, name: str) -> Path:
        return self.folder / "native" / "patches" / name

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=self.folder, env=self.environment, check=True, capture_output=True, text=True
        ).stdout

    def publish(self, version: str, files: dict[str, list[str]], sha256: str = "") -> str:
        """Puts a source distribution into the index; its sha256."""
        name = f"llama_cpp_python-{version}"
        content = {
            "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
            "backend.py": BACKEND,
            "PKG-INFO": f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {version}\n",
            **{f"vendor/llama.cpp/{path}": "".join(lines) for path, lines in files.items()},
        }
        with tarfile.open(self.index / f"{name}.tar.gz", "w:gz") as tar:
            for path, text in content.items():
                info = tarfile.TarInfo(f"{name}/{path}")
                info.size = len(text.encode())
                tar.addfile(info, io.BytesIO(text.encode()))
        found = hashlib.sha256((self.index / f"{name}.tar.gz").read_bytes()).hexdigest()
        with (self.index / "index.html").open("a") as page:
            page.write(f'<a href="{name}.tar.gz#sha256={sha256 or found}">{name}.tar.gz</a>\n')
        return found

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.folder / "native" / script), *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, cwd=self.folder.parent)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_patches_and_pin_follow_lines_that_moved(clone: Clone, tmp_path: Path) -> None:
    more = ["/* ü */\n", "\n", *LINES[:10], "between\n", *LINES[10:]]
    sha256 = clone.publish("1.1", {"a.c": more, "b.c": LINES})
    run = clone.run("upgrade.py", "1.1")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[1:3] == ["0001-first.patch: 2 of 2 hunks fit", "0002-second.patch: 1 of 1 hunks fit"]
    assert "git checkout native/patches pyproject.toml" in run.stdout
    assert clone.project.read_text() == f'    "llama-cpp-python==1.1",\n\n[tool.llama-source]\nsha256 = "{sha256}"\n'
    first = clone.patch("0001-first.patch").read_text()
    assert first.startswith("Why this patch is there.\n\ndiff --git a/a.c b/a.c\n--- a/a.c\n+++ b/a.c\n@@ ")
    assert changes(first) == changes(FIRST)
    assert "@@ -6,3 +6,4 @@" in first and "@@ -18,2 +19,3 @@" in first
    built = clone.run("llama_source.py", "--dest", str(tmp_path / "tree"), "--patches", str(clone.patch("")))
    assert built.returncode == 0, built.stderr
    assert built.stdout == f"llama-cpp-python 1.1 {sha256}\n"
    expected = "".join(["/* ü */\n", "\n", *PATCHED]).replace("line 10\n", "line 10\nbetween\n")
    assert (tmp_path / "tree" / "a.c").read_text() == expected


def test_a_patch_written_by_hand_is_put_right(clone: Clone) -> None:
    """Line numbers that are a little off, a file in two pieces: git takes both."""
    clone.patch("0001-first.patch").write_text(FIRST.replace("-15,2 +16,3", "-11,2 +11,3") + SECOND)
    clone.patch("0002-second.patch").unlink()
    clone.commit()
    clone.publish("1.1", {"a.c": ["\n", *LINES]})
    run = clone.run("upgrade.py", "1.1")
    assert run.returncode == 0, run.stderr
    patch = clone.patch("0001-first.patch").read_text()
    heads = [line.split(" @@")[0] for line in patch.splitlines() if line.startswith("@@")]
    assert heads == ["@@ -5,3 +5,3", "@@ -16,2 +16,3"]


def changes(patch: str) -> list[str]:
    """Its hunks without their heads."""
    return [line for line in patch[patch.index("@@") :].splitlines() if not line.startswith("@@")]


def test_a_patch_that_the_new_source_has_goes(clone: Clone) -> None:
    has_first = "".join(LINES).replace("line 5\n", "line five\nline five and a half\n")
    clone.publish("1.1", {"a.c": [has_first.replace("line 15\n", "line 15\nnew line\n")]})
    run = clone.run("upgrade.py", "1.1")
    assert run.returncode == 0, run.stderr
    changed = clone.git("status", "--porcelain").splitlines()
    assert " D native/patches/0001-first.patch" in changed
    assert changes(clone.patch("0002-second.patch").read_text()) == changes(SECOND)


OTHER = [*LINES[:4], "another 5\n", *LINES[5:]]
WITHOUT = [*LINES[:13], *LINES[17:]]


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            {"a.c": ["\n", *OTHER]},
            [
                "0001-first.patch: a.c, line 6 of 1.1: the lines changed; 1.1 has there:\n    another 5\n",
                "+line five\n",
            ],
        ),
        ({"a.c": WITHOUT}, ["0001-first.patch: a.c, line 14 of 1.1: the lines are gone or elsewhere", "+new line\n"]),
        ({"sub/b.c": LINES}, ["0001-first.patch: a.c, line 4 of 1.0: the file is now sub/b.c"]),
        ({"b.c": ["something else\n"]}, ["0001-first.patch: a.c, line 15 of 1.0: the file is gone"]),
    ],
)
def test_hunks_that_do_not_fit_are_told_and_nothing_changes(
    files: dict[str, list[str]], told: list[str], clone: Clone
) -> None:
    clone.publish("1.1", files)
    run = clone.run("upgrade.py", "1.1")
    assert run.returncode == 1
    for text in told:
        assert text in run.stdout
    (line,) = run.stderr.splitlines()
    assert "do not fit 1.1; nothing was changed" in line
    assert clone.git("status", "--porcelain") == ""
    assert [path.name for path in clone.cache.iterdir()] == ["llama_cpp_python-1.0.tar.gz"]


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("", "none is given: make upgrade VERSION="),
        ("latest", "VERSION=latest is none: make upgrade VERSION="),
        ("1.1; true", "is none: make upgrade VERSION="),
        ("7.0", "has no source llama_cpp_python-7.0.tar.gz, its newest are 1.0, 1.1: take another version or index"),
        ("1.1", "came with another sha256 than its package index names: try again, or take another index"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(version: str, told: str, clone: Clone) -> None:
    clone.publish("1.1", {"a.c": LINES}, sha256="0" * 64)
    assert told in only_line(clone.run("upgrade.py", version))
    assert clone.git("status", "--porcelain") == ""


def test_no_network_is_one_sentence(clone: Clone) -> None:
    clone.environment["PIP_INDEX_URL"] = "http://127.0.0.1:9/simple"
    line = only_line(clone.run("upgrade.py", "1.1"))
    assert "llama_cpp_python-1.1.tar.gz can't be downloaded" in line and line.endswith("connect to a package index")


@pytest.mark.parametrize("name", ["pyproject.toml", "native/patches/0001-first.patch", "native/patches/0003-new.patch"])
def test_uncommitted_changes_are_not_mixed_with(name: str, clone: Clone) -> None:
    with (clone.folder / name).open("a") as file:
        file.write("\n")
    assert only_line(clone.run("upgrade.py", "1.1")).endswith(f"commit or undo {name}")


def test_a_folder_that_is_no_clone_is_refused(clone: Clone) -> None:
    shutil.rmtree(clone.folder / ".git")
    clone.environment["GIT_CEILING_DIRECTORIES"] = str(clone.folder.parent)
    assert only_line(clone.run("upgrade.py", "1.1")).endswith("upgrade in a clone")


def only_line(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    return line
