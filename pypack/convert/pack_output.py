"""Where a conversion writes: the files beside the pack, and whether they can and may be written."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import SpaceError, UsageError
from ..format.pack import MANIFEST_SUFFIX, PACK_SUFFIX, manifest_path
from ..gguf.model import GGUFModel
from ..source.match import pack_path_for
from ..system.guard import Guard
from ..values.checks import check_path
from .journal import temporary_path

_PATH_MAX = 4096  # of Linux, with the final zero


class PackOutput:
    """``given``: the pack as the user named it; ``pack``: the file that is written, behind a link if it is one.

    Raises UsageError, or OSError.
    """

    def __init__(self, model: GGUFModel, output: str | os.PathLike[str] | None) -> None:
        self.given = _given_path(model, output)
        _check_length(self.given)
        self.guard = Guard(shard.path for shard in model.shards)
        # a link stays, and the pack lands on the disk that it leads to
        self.pack = Path(os.path.realpath(self.given)) if self.given.is_symlink() else self.given
        _check_length(self.pack)
        self.manifest = self.pack.with_name(self.pack.name + MANIFEST_SUFFIX)
        self.partial = self.pack.with_name(self.pack.name + ".partial")
        self.journal = self.pack.with_name(self.pack.name + ".partial.json")

    def check_writable(self) -> None:
        """Nothing that is already there is lost or laid open by writing these files."""
        folder = self.pack.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"folder {folder} is read-only: choose a folder you may write to with --output")
        if self.pack != self.given:
            self._check_link()
        for path in (self.pack, self.manifest):
            self.guard.check_name(path, is_renamed_over=True)
        for path in (self.partial, self.journal, temporary_path(self.manifest), temporary_path(self.journal)):
            self.guard.check_name(path)

    def check_space(self, needed_bytes: int, safety_margin_bytes: int) -> None:
        """Raises SpaceError unless the disk has this much room and the margin."""
        stats = os.statvfs(self.pack.parent)
        free_bytes = stats.f_bavail * stats.f_frsize
        if stats.f_blocks == 0:  # as on ramfs: it does not say
            return
        if needed_bytes > 0 and needed_bytes + safety_margin_bytes > free_bytes:
            gib = 1 << 30
            raise SpaceError(
                f"{self.pack.parent} has {free_bytes / gib:.2f} GiB free, but {self.pack.name} needs "
                f"{needed_bytes / gib:.2f} GiB more and a margin of {safety_margin_bytes / gib:.2f} GiB: "
                "free some space, choose another --output, or lower --safety-margin-gib"
            )

    def _check_link(self) -> None:
        """A link leads to a pack, or to where one may be; its manifest is there too."""
        if self.pack.suffix != PACK_SUFFIX or self.pack.is_symlink():
            raise UsageError(
                f"{self.given} is a link to {self.pack}, where no pack ({PACK_SUFFIX}) can be: "
                "remove the link, or choose another --output"
            )
        read_from = manifest_path(self.given)
        if os.path.realpath(read_from) != os.path.realpath(self.manifest):
            raise UsageError(
                f"{self.given} is a link to {self.pack}, but {read_from} is not one to the manifest there: "
                "remove it, or choose another --output"
            )


def _given_path(model: GGUFModel, output: str | os.PathLike[str] | None) -> Path:
    if output is None:
        return pack_path_for(model.path)
    path = Path(check_path("the path of the pack", output))
    if _is_folder(path):
        return path / pack_path_for(model.path).name
    if path.suffix != PACK_SUFFIX or path.name == PACK_SUFFIX:
        raise UsageError(f"output {path} must end in {PACK_SUFFIX} or be an existing folder")
    return path


def _check_length(pack: Path) -> None:
    """The folder exists, and all names beside the pack fit into it."""
    if not _is_folder(pack.parent):
        raise UsageError(f"folder {pack.parent} does not exist: make it, or choose another --output")
    longest = temporary_path(pack.with_name(pack.name + max(MANIFEST_SUFFIX, ".partial.json", key=len)))
    n_bytes, limit = len(os.fsencode(longest.name)), os.pathconf(pack.parent, "PC_NAME_MAX")
    if 0 < limit < n_bytes or len(os.fsencode(longest)) >= _PATH_MAX:  # -1: no limit
        raise UsageError(
            f"{pack} has too long a name: {longest.name} beside it has {n_bytes} bytes, and {limit} are allowed in a "
            f"name, {_PATH_MAX - 1} in a path: choose a shorter one with --output"
        )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # the name is too long, or the way there closed
        return False
