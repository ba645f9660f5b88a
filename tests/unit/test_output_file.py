"""What may be written over, and what never."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llama_expert_pack.pypack.errors import UsageError
from llama_expert_pack.pypack.system.output_file import open_output, refuse_same_file, write_output


def is_ours(head: bytes) -> bool:
    return head.startswith(b"ours")


def links(folder: Path, target: Path) -> dict[str, Path]:
    (folder / "folder").mkdir()
    (folder / "linked").symlink_to(folder / "folder")
    (folder / "symlink").symlink_to(target.name)
    if target.exists():
        (folder / "hard").hardlink_to(target)
    return {
        "itself": target,
        "in another way": folder / "folder" / ".." / target.name,
        "a symlink": folder / "symlink",
        "through a linked folder": folder / "linked" / ".." / target.name,
        **({"a hard link": folder / "hard"} if target.exists() else {}),
    }


@pytest.mark.parametrize("exists", [True, False])
def test_the_same_file_by_any_name(exists: bool, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    if exists:
        target.write_bytes(b"GGUF")
    for path in links(tmp_path, target).values():
        with pytest.raises(
            UsageError, match=r": --expert-trace is the same file as the model: give it a file of its own$"
        ):
            refuse_same_file({"--expert-trace": path}, {"the model": target})
        with pytest.raises(UsageError, match="b is the same file as a"):
            refuse_same_file({"a": target, "b": path}, {})
    refuse_same_file({"a": tmp_path / "x", "b": tmp_path / "folder" / "x"}, {"the model": target})
    refuse_same_file({"a": tmp_path / "none" / "x", "b": tmp_path / "none" / "y"}, {"the model": target})


def test_only_what_is_ours_or_empty_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (None, b"", b"ours, and longer than what replaces it"):
        if content is not None:
            path.write_bytes(content)
        write_output(path, b"ours", is_ours, "one of ours")
        assert path.read_bytes() == b"ours"
    for content in (b"GGUF", b"our", b"\0"):
        path.write_bytes(content)
        with pytest.raises(OSError, match="it holds something else than one of ours, which would be lost") as refused:
            open_output(path, is_ours, "one of ours")
        assert refused.value.filename == str(path) and path.read_bytes() == content


def test_a_read_only_file_stays(tmp_path: Path) -> None:
    """Root may write to it, and should not."""
    path = tmp_path / "file"
    path.write_bytes(b"ours")
    path.chmod(0o444)
    with pytest.raises(OSError, match=r"it is read-only|Permission denied"):
        open_output(path, is_ours, "one of ours")


@pytest.mark.timeout(30)
def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, what in (
        (tmp_path / "fifo", "a FIFO"),
        (Path("/dev/full"), "a character device"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(OSError, match=what):
            open_output(path, is_ours, "one of ours")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = open_output(path, is_ours, "one of ours")
    with pytest.raises(OSError, match="it is being written by another run"):
        open_output(path, is_ours, "one of ours")
    os.close(fd)
    os.close(open_output(path, is_ours, "one of ours"))
