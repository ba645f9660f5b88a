"""Conversion: the same bytes however they are read, resumed or repeated."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.memory_cap import memory_cap
from llama_expert_pack.pypack.convert import assemble, journal
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.convert.partial_pack import PartialPack
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.errors import (
    DirectIOError,
    ReadError,
    SourceMismatchError,
    SpaceError,
    UsageError,
)
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.system.guard import Guard
from tests.gguf_bytes import GGUF, facts, moe_tensors, split, tiny_moe
from tests.pack_tools import manifest_of
from tests.unit.convert.models import FINISHED, files_of, mixed, names, run


def test_leaves_exactly_two_files(model: Path) -> None:
    result = run(model)
    assert (result.reused, result.resumed_layers) == (False, 0)
    assert result.pack_bytes == result.path.stat().st_size
    assert names(model.parent) == FINISHED


@pytest.mark.parametrize(("piece_bytes", "jobs"), [(8192, 6), (20480, 1), (1 << 18, 2), (1 << 20, 1)])
def test_pieces_and_threads_do_not_matter(
    jobs: int, piece_bytes: int, model: Path, reference: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two pages at a time (most blocks in many pieces) to many experts at a time."""
    monkeypatch.setattr(assemble, "PIECE_BYTES", piece_bytes)
    assert files_of(run(model, jobs=jobs).path) == reference


def test_without_direct_io(model: Path, reference: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither side offers direct I/O, the page cache is used, and the result is the same."""
    opened = []

    def open_file(path: Path, direct_io: bool = True) -> int:
        if direct_io:
            raise DirectIOError("not here")
        opened.append(path)
        return os.open(path, os.O_RDONLY)

    monkeypatch.setattr(assemble, "open_file", open_file)
    monkeypatch.setattr(PartialPack, "_open_direct", lambda self: self._fd)
    path = run(model).path
    assert opened == [model]
    assert files_of(path) == reference
    assert verify(path, deep=True, source=model).hashed_bytes > 0


def test_direct_writes_that_fail_only_when_tried(
    model: Path, reference: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems open a file with O_DIRECT and then refuse to write."""
    pwrite = os.pwrite
    refused = []

    def picky(fd: int, data: bytes, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(22, "Invalid argument")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", picky)
    assert files_of(run(model, jobs=1).path) == reference
    assert len(refused) == 1


def test_short_reads_and_writes(model: Path, reference: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every system call may do less than asked for."""
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:8192]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:12288], offset))
    assert files_of(run(model).path) == reference


def test_shards(tmp_path: Path, reference: tuple[bytes, bytes]) -> None:
    """The blocks do not depend on how the model is split."""
    paths = split(mixed(), [1, 2, 7, 0, 6], tmp_path)
    result = run(paths[0])
    assert result.path == tmp_path / "model.expert-pack"
    assert result.path.read_bytes()[8192:] == reference[0][8192:]
    assert len(open_pack(result.path).manifest.source.shards) == 5
    verify(result.path, deep=True, source=paths[0])


def test_output_file_and_folder(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    assert run(model, output=folder).path == folder / "model.expert-pack"
    assert run(model, output=folder / "a.expert-pack").path == folder / "a.expert-pack"
    assert names(folder) == {
        "model.expert-pack", "model.expert-pack.manifest.json", "a.expert-pack", "a.expert-pack.manifest.json"
    }  # fmt: skip


@pytest.mark.parametrize("output", ["pack.bin", "model.gguf", ".expert-pack"])
def test_wrong_output(output: str, model: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in .expert-pack or be an existing folder"):
        run(model, output=model.parent / output)
    assert names(model.parent) == {"model.gguf"}


def test_output_folder_missing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        run(model, output=tmp_path / "no" / "a.expert-pack")


def test_finished_pack_is_reused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(model).path.stat()
    monkeypatch.setattr(PartialPack, "__init__", lambda *_: pytest.fail("nothing is to be written"))
    result = run(model)
    assert result.reused
    assert (result.path.stat().st_ino, result.path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_force_writes_anew(model: Path, reference: tuple[bytes, bytes]) -> None:
    before = run(model).path.stat().st_ino
    result = run(model, force=True)
    assert not result.reused
    assert result.path.stat().st_ino != before
    assert files_of(result.path) == reference
    assert names(model.parent) == FINISHED


def test_pack_of_another_model_in_the_way(model: Path, tmp_path: Path) -> None:
    path = run(model).path
    before = files_of(path)
    tiny_moe().write(model)
    with pytest.raises(SourceMismatchError, match="is the pack of another model"):
        run(model)
    assert files_of(path) == before
    assert not run(model, force=True).reused
    verify(path, deep=True, source=model)


@pytest.mark.parametrize("content", [b"", b"something else", bytes(9000)])
def test_something_else_in_the_way(content: bytes, model: Path) -> None:
    path = model.with_name("model.expert-pack")
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"is in the way.*--force"):
        run(model)
    assert path.read_bytes() == content
    assert names(model.parent) == {"model.gguf", "model.expert-pack"}
    assert not run(model, force=True).reused


def test_lost_manifest_is_not_invented(model: Path) -> None:
    path = run(model).path
    manifest_of(path).unlink()
    with pytest.raises(UsageError, match=r"has no manifest.*--force"):
        run(model)


def test_two_at_once(model: Path) -> None:
    partial = model.with_name("model.expert-pack.partial")
    with open(partial, "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="is being written by another conversion"):
            run(model)
    assert not run(model).reused


def test_lock_is_not_taken_on_a_file_that_moved_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other conversion renames its partial pack between our open and our lock."""
    path, finished = tmp_path / "a.partial", tmp_path / "a"
    real = fcntl.flock
    moved: list[Path] = []

    def flock(fd: int, operation: int) -> None:
        if not moved:
            moved.append(path.rename(finished))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    fd = journal.lock_partial(path, Guard([]))
    assert os.path.samestat(os.fstat(fd), path.stat())
    assert not os.path.samestat(os.fstat(fd), finished.stat())
    os.close(fd)


def test_margin_is_kept_free(model: Path) -> None:
    with pytest.raises(SpaceError, match=r"GiB free, but model.expert-pack needs .* a margin of 1048576.00 GiB"):
        convert(model, safety_margin_bytes=1 << 50)
    assert names(model.parent) == {"model.gguf"}


@pytest.mark.parametrize("jobs", [0, -1, 7])
def test_wrong_jobs(jobs: int, model: Path) -> None:
    with pytest.raises(UsageError, match="choose 1 to 6"):
        run(model, jobs=jobs)


def test_read_error_keeps_what_is_done(
    model: Path, reference: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    limit = 700_000

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset > limit:
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        # the trial read at the end of the file belongs to opening it
        patch.setattr(assemble, "open_file", lambda path, direct_io=True: os.open(path, os.O_RDONLY | os.O_DIRECT))
        with pytest.raises(ReadError, match=r"model.gguf cannot be read at byte \d+: Input/output error") as caught:
            run(model)
    assert caught.value.errno == 5
    result = run(model)
    assert result.resumed_layers == 1
    assert files_of(result.path) == reference


def test_model_that_shrinks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PartialPack.reserve

    def reserve(self: PartialPack, size_bytes: int) -> None:
        os.truncate(model, 1_000_000)
        real(self, size_bytes)

    monkeypatch.setattr(PartialPack, "reserve", reserve)
    with pytest.raises(ReadError, match="was cut short while it was read"):
        run(model)


def test_model_that_changes_meanwhile(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PartialPack.sync

    def sync(self: PartialPack) -> None:
        os.utime(model, ns=(5, 5))
        real(self)

    monkeypatch.setattr(PartialPack, "sync", sync)
    with pytest.raises(SourceMismatchError, match="changed while it was converted"):
        run(model)
    assert "model.expert-pack" not in names(model.parent)


def test_name_that_no_manifest_may_hold(tmp_path: Path) -> None:
    path = tiny_moe().write(tmp_path / "a\\b.gguf")
    with pytest.raises(UsageError, match="rename the file"):
        run(path)
    assert names(tmp_path) == {"a\\b.gguf"}


def large_experts(path: Path) -> Path:
    """Two of 200 MB."""
    model = GGUF(facts(n_expert=2), moe_tensors(0, n_expert=2, n_embd=4096, n_ff=4096))
    head = model.head()
    with open(path, "wb") as file:
        file.write(head)
        end = -(-len(head) // 32) * 32 + sum(-(-t.size_bytes // 32) * 32 for t in model.tensors)
        while file.tell() < end:  # a hole would be taken for experts that are missing
            file.write(bytes(min(16 << 20, end - file.tell())))
    return path


def test_little_memory(tmp_path: Path) -> None:
    """Two jobs would be killed; the default is then one."""
    path = large_experts(tmp_path / "model.gguf")
    command = [
        sys.executable,
        "-m",
        "llama_expert_pack.pypack.command.cli",
        "convert",
        str(path),
        "--safety-margin-gib",
        "0",
    ]
    try:
        with memory_cap(110 << 20) as cap:
            done = subprocess.run(cap.command(command), capture_output=True, text=True)
    except UsageError as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr
    assert "is complete" in done.stdout


def test_memory_is_bounded_by_pieces(tmp_path: Path) -> None:
    """One expert of 200 MB and jobs at their maximum: resident memory stays under 512 MiB."""
    path = large_experts(tmp_path / "model.gguf")
    script = (
        "import sys; from llama_expert_pack.pypack.command.cli import main\n"
        "try: main(['convert', sys.argv[1], '--jobs', '6', '--safety-margin-gib', '0'])\n"
        "finally: print(*(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    out = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert 65 * 1024 < int(out.stdout.split()[-2]) < 512 * 1024, "unlike ru_maxrss, not that of pytest before"
    assert open_pack(tmp_path / "model.expert-pack").layers[0].block_bytes > 200_000_000


def test_the_model_is_read_where_direct_io_fails_only_when_tried(
    model: Path, reference: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system opens with O_DIRECT and gives a page, but refuses more."""
    preadv = os.preadv
    refused = []

    def picky(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and len(buffers[0]) > 4096:
            refused.append(fd)
            raise OSError(22, "Invalid argument")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", picky)
    path = run(model).path
    assert files_of(path) == reference
    verify(path, deep=True, source=model)
    assert refused
