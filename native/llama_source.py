"""Prepares the pinned llama.cpp source: fetch once, check, unpack, patch.

Usage: llama_source.py [--dest DIR] [--patches DIR]

Without --dest it only fills the cache (${XDG_CACHE_HOME:-~/.cache}/llama-expert-pack); with the archive there no
network is needed. A DIR that already holds this source with these patches is left alone, so builds stay incremental;
of a changed patch only the files it touches are written again. Prints "name version sha256" of the source.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NAME = "llama-cpp-python"
VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
ARCHIVE = f"llama_cpp_python-{VERSION}.tar.gz"
VENDORED = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"


class SourceError(Exception):
    """One sentence for the person who builds."""


def cached_archive() -> Path:
    """The archive in the cache, downloaded when it is not there. Raises SourceError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama-expert-pack"
    archive = cache / ARCHIVE
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            download(Path(scratch))
            check_digest(Path(scratch) / ARCHIVE)
            (Path(scratch) / ARCHIVE).replace(archive)
    check_digest(archive)
    return archive


def check_digest(archive: Path) -> None:
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        raise SourceError(f"{archive}: expected sha256 {SHA256}, found {found}: delete the file and try again")


def download(folder: Path) -> None:
    """Lets pip fetch the archive, so that its index, proxy and certificate settings hold."""
    reasons = []
    for pip in ([sys.executable, "-m", "pip"], ["python3", "-m", "pip"], ["pip3"], ["pip"]):
        # pip asks the archive's build backend for its metadata. The one that is installed answers at once; a
        # build environment of its own may first have to compile CMake.
        for isolation in (["--no-build-isolation"], []):
            reason = try_download([*pip, "download", *isolation], folder)
            if reason is None:
                return
            reasons.append(reason)
    raise SourceError(
        f"the source {ARCHIVE} is not in the cache and can't be downloaded ({'; '.join(dict.fromkeys(reasons))}): "
        f"connect to a package index, or put the file into {folder.parent}"
    )


def try_download(command: list[str], folder: Path) -> str | None:
    """Why pip did not bring the archive, None if it did."""
    command += ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), f"{NAME}=={VERSION}"]
    # our own build sets these for its own CMake run
    environment = {k: v for k, v in os.environ.items() if k not in ("CMAKE_ARGS", "SKBUILD_CMAKE_ARGS")}
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    except FileNotFoundError:
        return "not found"
    if run.returncode == 0 and (folder / ARCHIVE).exists():
        return None
    return (run.stderr.strip() or "no archive came").splitlines()[-1]


def unpack(archive: Path, dest: Path) -> None:
    with tarfile.open(archive) as tar:
        members = []
        for member in tar:
            if member.name.startswith(VENDORED) and member.name != VENDORED + ".git":
                member.name = member.name[len(VENDORED) :]
                members.append(member)
        options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(dest, members, **options)  # type: ignore[arg-type]


def apply_patches(tree: Path, patches: list[Path]) -> None:
    # git would find a repository above the tree and skip files that it takes to be outside
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    for patch in patches:
        try:
            run = subprocess.run(
                ["git", "apply", "--whitespace=nowarn", str(patch.resolve())],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            raise SourceError("git is needed to apply the patches and was not found: install git") from None
        if run.returncode != 0:
            raise SourceError(
                f"{patch}: does not apply to {NAME} {VERSION}: {'; '.join(run.stderr.strip().splitlines())}"
            )


def prepare(dest: Path, patches: list[Path]) -> None:
    """Brings dest to the patched source, touching only files whose content changes."""
    state = hashlib.sha256(SHA256.encode())
    for patch in patches:
        state.update(patch.read_bytes())
    stamp = dest / ".expert-pack-source"
    if stamp.exists() and stamp.read_text() == state.hexdigest():
        return
    archive = cached_archive()
    fresh = dest.with_name(dest.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    unpack(archive, fresh)
    apply_patches(fresh, patches)
    if dest.exists():
        for path in fresh.rglob("*"):
            old = dest / path.relative_to(fresh)
            if not path.is_file() or path.is_symlink():
                continue
            if not old.exists() or old.read_bytes() != path.read_bytes():
                old.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, old)  # with a new time stamp: it must be compiled again
        shutil.rmtree(fresh)
    else:
        fresh.rename(dest)
    stamp.write_text(state.hexdigest())


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepares the pinned llama.cpp source.")
    parser.add_argument("--dest", type=Path, help="folder to unpack into")
    parser.add_argument("--patches", type=Path, help="folder of *.patch files to apply, in order of name")
    args = parser.parse_args()
    try:
        if args.dest is None:
            cached_archive()
        else:
            prepare(args.dest, sorted(args.patches.glob("*.patch")) if args.patches else [])
    except (SourceError, OSError, tarfile.TarError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(NAME, VERSION, SHA256)
    return 0


if __name__ == "__main__":
    sys.exit(main())
