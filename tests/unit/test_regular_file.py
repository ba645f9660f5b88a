"""Files that must be regular: everything else is refused at once, with its kind."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from llama_expert_pack.pypack.system.regular_file import open_regular


def test_a_regular_file_is_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    fd = open_regular(tmp_path / "link")
    try:
        assert os.read(fd, 10) == b"text"
    finally:
        os.close(fd)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_a_fifo_is_refused_without_waiting(tmp_path: Path, flags: int) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a FIFO, not a regular file"):
        open_regular(tmp_path / "pipe", flags)


def test_devices_sockets_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="character device"):
        open_regular("/dev/null")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="socket"):
            open_regular(tmp_path / "socket")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


def test_nothing_stays_open_when_it_is_refused() -> None:
    before = list(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        with pytest.raises(OSError):
            open_regular("/dev/zero")
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before)
