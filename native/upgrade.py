"""Takes the patches and the pin to another llama-cpp-python: `make upgrade VERSION=0.3.37`.

Usage: upgrade.py VERSION

git merges each hunk of native/patches three-way: the pinned source, what the hunk makes of it, the new source. If hunks
fail, each is told with its place and reason, and nothing is changed. Otherwise the patches and the pin in
pyproject.toml are written anew. docs/UPGRADING.md tells the rest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llama_source as source

ROOT = Path(__file__).resolve().parents[1]
PINNED = ("native/patches", "pyproject.toml")  # what belongs to one version
VERSION_FORM = re.compile(r"\d+(\.\d+)+(\.?[a-z]+\d+)?")
HUNK_HEAD = re.compile(r"@@ -(\d+)\S* \+\S+ @@")
LINES_SHOWN = 15


@dataclass(frozen=True)
class Hunk:
    """One place that a patch changes; `line` counts from 1 in the pinned file."""

    file: str
    line: int
    text: list[str]

    @property
    def old(self) -> list[str]:
        return [line[1:] for line in self.text if line[0] in " -"]

    @property
    def new(self) -> list[str]:
        return [line[1:] for line in self.text if line[0] in " +"]


@dataclass(frozen=True)
class Trees:
    """The pinned source and the new one, unpacked; each gets one patch after the other."""

    pinned: Path
    new: Path
    version: str


def git(folder: Path, command: str, *arguments: str | Path, most: int = 0) -> tuple[int, str]:
    """Exit status and output of git. Raises SourceError if the status is above `most`."""
    # in the trees without the user's settings, which could change what a diff looks like
    settings = {} if folder == ROOT else {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    run = subprocess.run(["git", command, *arguments], cwd=folder, env={**os.environ, **settings}, capture_output=True)
    if run.returncode > most:
        raise source.SourceError(f"git {command} in {folder}: {run.stderr.decode().strip()}")
    return run.returncode, run.stdout.decode(errors="surrogateescape")


def lines_of(text: str) -> list[str]:
    return re.findall(r".*\n|.+$", text)


def write(path: Path, text: str) -> None:
    path.write_bytes(text.encode(errors="surrogateescape"))


def hunks_of(diff: str) -> list[Hunk]:
    hunks: list[Hunk] = []
    file, in_hunk = "", False
    for line in lines_of(diff):
        if line.startswith("diff --git "):
            file, in_hunk = line.rstrip("\n").rpartition(" b/")[2], False
        elif head := HUNK_HEAD.match(line):
            hunks.append(Hunk(file, int(head[1]), []))
            in_hunk = True
        elif in_hunk:
            hunks[-1].text.append(line)
    return hunks


def merge(hunk: Hunk, trees: Trees) -> str:
    """Brings a hunk into the new source, or says where and why it does not fit."""
    new, pinned, changed = trees.new / hunk.file, trees.pinned.with_name("base"), trees.pinned.with_name("changed")
    if not new.exists():
        return f"line {hunk.line} of {source.VERSION}: {why_gone(hunk.file, trees)}"
    _, text = git(trees.pinned, "show", f":{hunk.file}")
    lines, start = lines_of(text), hunk.line - 1
    write(pinned, text)
    write(changed, "".join([*lines[:start], *hunk.new, *lines[start + len(hunk.old) :]]))
    labels = ["-L", "new", "-L", "pinned", "-L", "hunk"]
    n_conflicts, merged = git(trees.new, "merge-file", "-p", "--diff3", *labels, new, pinned, changed, most=127)
    if n_conflicts:
        _, before = git(trees.new, "show", f":{hunk.file}")
        n_added = new.read_bytes().count(b"\n") - before.count("\n")  # by the hunks above
        return why_conflict(hunk, merged.split("\n"), n_added, trees.version)
    write(new, merged)
    return ""


@cache
def why_gone(file: str, trees: Trees) -> str:
    """Why a file of the pinned source is not in the new one."""
    options = ["--no-index", "--find-renames", "--diff-filter=R", "--name-status"]
    _, renames = git(trees.new, "diff", *options, trees.pinned, trees.new, most=1)
    for line in renames.splitlines():
        _, before, after = line.split("\t")
        if before == str(trees.pinned / file):
            return f"the file is now {Path(after).relative_to(trees.new)}"
    return "the file is gone"


def why_conflict(hunk: Hunk, merged: list[str], n_added: int, version: str) -> str:
    """The place, what stands there, and the hunk, from a merge of which nothing else is in conflict."""
    start, end = merged.index("<<<<<<< new"), merged.index("||||||| pinned")
    there = merged[start + 1 : end]
    reason = f"the lines changed; {version} has there:" if there else "the lines are gone or elsewhere"
    wanted = [line.rstrip() for line in hunk.text]
    parts = [*shorten(there), f"but the hunk, made for {source.VERSION}, is:", *shorten(wanted)]
    return "\n".join([f"line {start + 1 - n_added} of {version}: {reason}", *(f"    {line}" for line in parts)])


def shorten(lines: list[str]) -> list[str]:
    more = len(lines) - LINES_SHOWN
    return lines if more <= 0 else [*lines[:LINES_SHOWN], f"... {more} more"]


def port(patch: Path, trees: Trees) -> tuple[int, str]:
    """Applies a patch to both trees: how many hunks do not fit, and the patch for the new source. Prints the former."""
    _, counts = git(trees.pinned, "apply", "--numstat", patch)
    files = [line.split("\t")[2] for line in counts.splitlines()]
    for tree in (trees.pinned, trees.new):  # the index holds what was there before
        git(tree, "add", "--force", *(file for file in files if (tree / file).exists()))
    source.apply_patches(trees.pinned, [patch])
    # Not the patch's own hunks: git finds those also where their line numbers are wrong.
    hunks = hunks_of(git(trees.pinned, "diff", "--unified=1")[1])
    n_failed = 0
    for hunk in hunks:
        if why := merge(hunk, trees):
            n_failed += 1
            print(f"{patch.name}: {hunk.file}, {why}")
    print(f"{patch.name}: {len(hunks) - n_failed} of {len(hunks)} hunks fit")
    _, diff = git(trees.new, "diff", "--unified=1")
    for tree in (trees.pinned, trees.new):
        git(tree, "add", "--update")
    introduction = re.split(r"^(?:diff --git |--- a/)", patch.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    # git's own heads name hashes, which change with every version
    return n_failed, introduction + re.sub(r"^index .*\n", "", diff, flags=re.MULTILINE) if diff else ""


def check(version: str) -> None:
    """Refuses what can't be tried, or could not be undone. Raises SourceError."""
    if not VERSION_FORM.fullmatch(version):
        found = f"VERSION={version} is none" if version else "none is given"
        raise source.SourceError(f"a version of {source.NAME} is needed, {found}: make upgrade VERSION=0.3.37")
    status, changed = git(ROOT, "status", "--porcelain", "--", *PINNED, most=128)
    if status:
        raise source.SourceError(f"{ROOT}: no git clone, so nothing could be undone: upgrade in a clone")
    if changed:
        files = ", ".join(line[3:] for line in changed.splitlines())
        raise source.SourceError(f"uncommitted changes could not be told from what follows: commit or undo {files}")


def upgrade(version: str) -> None:
    """Changes the clone, if all hunks fit. Raises SourceError."""
    print(f"from {source.NAME} {source.VERSION} to {version}: fetches and unpacks both, then merges", flush=True)
    pinned_archive = source.cached_archive()
    with tempfile.TemporaryDirectory(dir=pinned_archive.parent) as scratch:
        archive = source.download(version, Path(scratch))
        trees = Trees(Path(scratch) / "pinned", Path(scratch) / "new", version)
        for packed, tree in ((pinned_archive, trees.pinned), (archive, trees.new)):
            source.unpack(packed, tree)
            git(tree, "init", "--quiet")
        ported = {patch: port(patch, trees) for patch in source.patches_in(ROOT / "native" / "patches")}
        if n_failed := sum(n for n, _ in ported.values()):
            raise source.SourceError(
                f"{n_failed} hunks do not fit {version}; nothing was changed: see docs/UPGRADING.md"
            )
        sha256 = source.digest(archive)
        archive.replace(pinned_archive.with_name(archive.name))
    for patch, (_, text) in ported.items():
        if text:
            write(patch, text)
        else:  # the new source has all of it
            patch.unlink()
    pin = source.PROJECT.read_text().replace(f'=={source.VERSION}"', f'=={version}"')
    source.PROJECT.write_text(pin.replace(source.SHA256, sha256))


def main() -> int:
    version = sys.argv[1] if len(sys.argv) > 1 else ""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # any byte of the source
    try:
        check(version)
        upgrade(version)
    except (source.SourceError, OSError, tarfile.TarError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"the patches and the pin are {version}'s now; to undo that: git checkout {' '.join(PINNED)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
