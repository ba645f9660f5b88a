"""Conversion: the same bytes however they are read, resumed or repeated."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from lab.memory_cap import memory_cap
from llama_expert_pack.pypack.convert import assemble, journal
from llama_expert_pack.pypack.convert.convert import Conversion, convert
from llama_expert_pack.pypack.convert.partial_pack import PartialPack
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.errors import (
    DirectIOError,
    PackError,
    ReadError,
    SourceMismatchError,
    SpaceError,
    UsageError,
)
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.system.guard import Guard
from tests.gguf_bytes import GGUF, facts, moe_tensors, split, tiny_moe
from tests.pack_tools import manifest_of


def mixed() -> GGUF:
    """Blocks of four sizes, from one page to over 1 MiB."""
    return GGUF(
        facts(),
        [
            *moe_tensors(0, n_expert=40, n_embd=32, n_ff=8, types=(24, 24, 24)),
            *moe_tensors(1, n_expert=5, n_embd=512, n_ff=256),
            *moe_tensors(3, n_expert=7, n_embd=96, n_ff=160, types=(2, 8, 1)),
            *moe_tensors(4, n_expert=3, n_embd=256, n_ff=512, types=(12, 14, 10)),
        ],
    )


def run(model: Path, **options: object) -> Conversion:
    return convert(model, safety_margin_bytes=0, **options)  # type: ignore[arg-type]


def files_of(pack: Path) -> tuple[bytes, bytes]:
    return pack.read_bytes(), manifest_of(pack).read_bytes()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    model = mixed().write(tmp_path_factory.mktemp("reference") / "model.gguf")
    return files_of(run(model).path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return mixed().write(tmp_path / "model.gguf")


@pytest.fixture(autouse=True)
def checkpoint_after_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("llama_expert_pack.pypack.convert.convert"), "CHECKPOINT_INTERVAL_S", 0)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


FINISHED = {"model.gguf", "model.expert-pack", "model.expert-pack.manifest.json"}


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


class Stopped(BaseException):
    """Raised in place of a signal."""


def stop_after_layers(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = journal.write_atomically
    written = []

    def write(path: Path, data: bytes, guard: Guard) -> None:
        real(path, data, guard)
        written.append(path)
        if len(written) == n:
            raise Stopped

    monkeypatch.setattr(import_module("llama_expert_pack.pypack.convert.convert"), "write_atomically", write)


@pytest.fixture
def stopped(model: Path) -> Iterator[Path]:
    """A model whose conversion was stopped after two of four layers."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after_layers(2, patch)
        with pytest.raises(Stopped):
            run(model)
    assert names(model.parent) == {
        "model.gguf",
        "model.expert-pack.partial",
        "model.expert-pack.partial.json",
    }
    yield model


def test_resume(stopped: Path, reference: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished layers are not read or written again."""
    offsets = []
    real = PartialPack.write_blocks

    def write_blocks(self: PartialPack, data: assemble.Bytes, offset: int) -> None:
        offsets.append(offset)
        real(self, data, offset)

    monkeypatch.setattr(PartialPack, "write_blocks", write_blocks)
    result = run(stopped, jobs=1)
    assert result.resumed_layers == 2
    assert min(offsets) == open_pack(result.path).layers[2].data_offset
    assert files_of(result.path) == reference
    assert names(stopped.parent) == FINISHED


def test_layers_may_share_a_checkpoint(
    model: Path, reference: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two layers get none of their own; the third makes all three safe."""
    clock = iter([0.0, 1.0, 4.9, 5.0, 5.0, *[9.0] * 9])
    module = import_module("llama_expert_pack.pypack.convert.convert")
    monkeypatch.setattr(module, "CHECKPOINT_INTERVAL_S", 5.0)
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "monotonic", lambda: next(clock))
        stop_after_layers(1, patch)
        with pytest.raises(Stopped):
            run(model, jobs=1)
    result = run(model)
    assert result.resumed_layers == 3
    assert files_of(result.path) == reference


def test_partial_pack_is_no_pack(stopped: Path) -> None:
    with pytest.raises(PackError, match="unfinished pack"):
        open_pack(stopped.with_name("model.expert-pack.partial"))


def touch(model: Path) -> None:
    os.utime(model, ns=(1, 1))


def change_expert(model: Path) -> None:
    data = bytearray(model.read_bytes())
    data[-1000] ^= 1
    model.write_bytes(data)


def other_model(model: Path) -> None:
    tiny_moe().write(model)


@pytest.mark.parametrize("change", [touch, change_expert, other_model])
def test_changed_model_is_not_resumed(change: Callable[[Path], None], stopped: Path) -> None:
    before = names(stopped.parent)
    change(stopped)
    with pytest.raises(SourceMismatchError, match=r"the model has changed since; use --restart"):
        run(stopped)
    assert names(stopped.parent) == before
    result = run(stopped, restart=True)
    assert result.resumed_layers == 0
    verify(result.path, deep=True, source=stopped)


def test_changed_package_is_not_resumed(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("llama_expert_pack.pypack.convert.convert"), "BUILDER", "another builder")
    with pytest.raises(SourceMismatchError, match=r"options or this package have changed since; use --restart"):
        run(stopped)


def cut_partial(model: Path) -> None:
    os.truncate(model.with_name("model.expert-pack.partial"), 100_000)


def zero_partial_index(model: Path) -> None:
    with open(model.with_name("model.expert-pack.partial"), "r+b") as file:
        file.seek(4096)
        file.write(bytes(400))


def spoil_journal(text: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        model.with_name("model.expert-pack.partial.json").write_text(text)

    change.__name__ = f"spoil_journal_{len(text)}"
    return change


def promise_more(model: Path) -> None:
    path = model.with_name("model.expert-pack.partial.json")
    path.write_text(path.read_text().replace('"layers_done":2', '"layers_done":3'))


def promise_far_more(model: Path) -> None:
    path = model.with_name("model.expert-pack.partial.json")
    path.write_text(path.read_text().replace('"layers_done":2', '"layers_done":99'))


@pytest.mark.parametrize(
    "damage",
    [
        cut_partial,
        zero_partial_index,
        spoil_journal(""),
        spoil_journal("{}"),
        spoil_journal("[[["),
        promise_more,
        promise_far_more,
    ],
)
def test_damaged_remains_are_not_resumed(
    damage: Callable[[Path], None], stopped: Path, reference: tuple[bytes, bytes]
) -> None:
    damage(stopped)
    with pytest.raises(PackError, match=r"damaged.*--restart"):
        run(stopped)
    os.utime(stopped)
    result = run(stopped, restart=True)
    assert result.resumed_layers == 0
    assert files_of(result.path) == reference


def test_journal_without_partial_pack(stopped: Path, reference: tuple[bytes, bytes]) -> None:
    stopped.with_name("model.expert-pack.partial").unlink()
    result = run(stopped)
    assert result.resumed_layers == 0
    assert files_of(result.path) == reference


def test_partial_pack_without_journal(stopped: Path, reference: tuple[bytes, bytes]) -> None:
    """Nothing is known about it, so nothing of it is used."""
    partial = stopped.with_name("model.expert-pack.partial")
    stopped.with_name("model.expert-pack.partial.json").unlink()
    partial.write_bytes(b"\xff" * 50_000_000)
    result = run(stopped)
    assert result.resumed_layers == 0
    assert files_of(result.path) == reference


def test_stopped_before_the_manifest(
    model: Path, reference: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renamed but without a manifest: not a pack yet, but all that is missing is the manifest."""
    with monkeypatch.context() as patch:
        patch.setattr(
            import_module("llama_expert_pack.pypack.convert.convert"),
            "_write_manifest",
            lambda *_: (_ for _ in ()).throw(Stopped),
        )
        with pytest.raises(Stopped):
            run(model)
    path = model.with_name("model.expert-pack")
    with pytest.raises(PackError, match="has no manifest"):
        open_pack(path)
    assert run(model).reused
    assert files_of(path) == reference
    assert names(model.parent) == FINISHED


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
