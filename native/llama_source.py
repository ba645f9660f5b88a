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
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

NAME = "llama-cpp-python"
# The pin stands where pip needs the version. Python 3.10 has no TOML reader.
PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
PIN = re.compile(rf'"{NAME}==(.+)",(?s:.+)\n\[tool\.llama-source\]\nsha256 = "(.+)"')


class SourceError(Exception):
    """One sentence for the person who builds."""


def read_pin() -> tuple[str, str]:
    """Version and sha256 of the source that the patches belong to."""
    pin = PIN.search(PROJECT.read_text())
    if pin is None:
        sys.exit(f"error: {PROJECT}: expected version and sha256 of {NAME}, found none: restore the file")
    return pin[1], pin[2]


VERSION, SHA256 = read_pin()


def archive_name(version: str) -> str:
    return f"llama_cpp_python-{version}.tar.gz"


def cached_archive() -> Path:
    """The archive in the cache, downloaded when it is not there. Raises SourceError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama-expert-pack"
    archive = cache / archive_name(VERSION)
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            try:
                fresh = download(VERSION, Path(scratch))
            except SourceError as error:
                raise SourceError(f"{error}, or put the file into {cache}") from error
            check_digest(fresh)
            fresh.replace(archive)
    check_digest(archive)
    return archive


def digest(archive: Path) -> str:
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def check_digest(archive: Path) -> None:
    found = digest(archive)
    if found != SHA256:
        raise SourceError(f"{archive}: expected sha256 {SHA256}, found {found}: delete the file and try again")


def download(version: str, folder: Path) -> Path:
    """Lets pip fetch an archive, so that its index, proxy and certificate settings hold. Raises SourceError."""
    archive = folder / archive_name(version)
    reasons = []
    for pip in ([sys.executable, "-m", "pip"], ["python3", "-m", "pip"], ["pip3"], ["pip"]):
        # pip asks the archive's build backend for its metadata. The one that is installed answers at once; a
        # build environment of its own may first have to compile CMake.
        for isolation in (["--no-build-isolation"], []):
            said = try_download([*pip, "download", *isolation], version, folder)
            if archive.exists():
                return archive
            check_index_answer(said, version)
            reasons.append(said.splitlines()[-1])
    raise SourceError(
        f"the source {archive.name} can't be downloaded ({'; '.join(dict.fromkeys(reasons))}): "
        "connect to a package index"
    )


def check_index_answer(said: str, version: str) -> None:
    """Raises SourceError if the index was reached: another pip would hear the same."""
    known = re.search(r"\(from versions: (?!none\))(.+)\)", said)
    versions = known[1].split(", ") if known else [version]
    if version not in versions:
        newest = ", ".join(versions[-3:])
        raise SourceError(
            f"the package index has no source {archive_name(version)}, its newest are {newest}: "
            "take another version or index"
        )
    if "DO NOT MATCH THE HASHES" in said:
        raise SourceError(
            f"the source {archive_name(version)} came with another sha256 than its package index names: "
            "try again, or take another index"
        )


def try_download(command: list[str], version: str, folder: Path) -> str:
    """What pip said; never empty."""
    command += ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), f"{NAME}=={version}"]
    # our own build sets these for its own CMake run
    environment = {k: v for k, v in os.environ.items() if k not in ("CMAKE_ARGS", "SKBUILD_CMAKE_ARGS")}
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    except FileNotFoundError:
        return "not found"
    return run.stderr.strip() or "no archive came"


def unpack(archive: Path, dest: Path) -> None:
    vendored = archive.name.removesuffix(".tar.gz") + "/vendor/llama.cpp/"
    with tarfile.open(archive) as tar:
        members = []
        for member in tar:
            if member.name.startswith(vendored) and member.name != vendored + ".git":
                member.name = member.name[len(vendored) :]
                member.mtime = time.time()  # what was compiled from another version is older
                members.append(member)
        options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(dest, members, **options)  # type: ignore[arg-type]


def patches_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.patch"))


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
    """Brings dest to the patched source; where the source stays, it touches only files whose content changes."""
    patched = hashlib.sha256(b"".join(patch.read_bytes() for patch in patches)).hexdigest()
    stamp = dest / ".expert-pack-source"
    held = stamp.read_text().split() if stamp.exists() else []
    if held == [SHA256, patched]:
        return
    archive = cached_archive()
    fresh = dest.with_name(dest.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    unpack(archive, fresh)
    apply_patches(fresh, patches)
    if held[:1] == [SHA256]:
        copy_changed(fresh, dest)
        shutil.rmtree(fresh)
    else:  # nothing of another version may stay: upstream's build takes whole folders
        shutil.rmtree(dest, ignore_errors=True)
        fresh.rename(dest)
    stamp.write_text(f"{SHA256} {patched}\n")


def copy_changed(fresh: Path, dest: Path) -> None:
    for path in fresh.rglob("*"):
        old = dest / path.relative_to(fresh)
        if not path.is_file() or path.is_symlink():
            continue
        if not old.exists() or old.read_bytes() != path.read_bytes():
            old.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, old)  # with a new time stamp: it must be compiled again


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepares the pinned llama.cpp source.")
    parser.add_argument("--dest", type=Path, help="folder to unpack into")
    parser.add_argument("--patches", type=Path, help="folder of *.patch files to apply, in order of name")
    args = parser.parse_args()
    try:
        if args.dest is None:
            cached_archive()
        else:
            prepare(args.dest, patches_in(args.patches) if args.patches else [])
    except (SourceError, OSError, tarfile.TarError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(NAME, VERSION, SHA256)
    return 0


if __name__ == "__main__":
    sys.exit(main())
