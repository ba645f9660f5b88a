"""Where a conversion writes: only its own files, not through links, never the model; names, links, permissions."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from llama_expert_pack.pypack.convert.convert import Conversion, convert
from llama_expert_pack.pypack.convert.journal import write_atomically
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.errors import ExpertPackError, UsageError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import check_source
from llama_expert_pack.pypack.system.guard import Guard
from tests.gguf_bytes import split, tiny_moe
from tests.pack_tools import manifest_of

OWN_NAMES = (".partial", ".partial.json", ".partial.json.tmp", ".manifest.json.tmp")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_moe().write(tmp_path / "model.gguf")


def run(model: Path, **options: object) -> Conversion:
    return convert(model, safety_margin_bytes=0, **options)  # type: ignore[arg-type]


def beside(model: Path, suffix: str) -> Path:
    return model.with_name(f"model.expert-pack{suffix}")


def contents(folder: Path) -> dict[str, bytes | str]:
    """Each file's bytes, each link's target."""
    return {
        path.name: str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in folder.iterdir()
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("suffix", OWN_NAMES)
@pytest.mark.parametrize(
    ("make", "target"),
    [
        (os.symlink, "victim"),
        (os.symlink, "model.gguf"),
        (os.symlink, "nothing"),
        (os.link, "victim"),
        (os.link, "model.gguf"),
    ],
)
def test_links_at_the_names_of_a_conversion(
    make: Callable[[Path, Path], None], target: str, suffix: str, force: bool, model: Path
) -> None:
    victim = model.with_name(target)
    if target == "victim":
        victim.write_bytes(b"precious")
    make(victim, beside(model, suffix))
    before = contents(model.parent)
    with pytest.raises(
        UsageError, match=r"is in the way \((it is a symbolic link|the file has 2 names|it is a file of)"
    ):
        run(model, force=force)
    assert contents(model.parent) == before


def test_links_that_appear_after_the_check(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens and makes the files does not follow them either."""
    victim = model.with_name("victim")
    victim.write_bytes(b"precious")
    monkeypatch.setattr(
        import_module("llama_expert_pack.pypack.convert.pack_output").PackOutput, "check_writable", lambda self: None
    )
    for suffix in OWN_NAMES:
        for make in (os.symlink, os.link):
            make(victim, beside(model, suffix))
            with pytest.raises(ExpertPackError):
                run(model)
            assert victim.read_bytes() == b"precious"
            assert not beside(model, ".manifest.json").exists()
            for left in model.parent.glob("model.expert-pack*"):
                left.unlink()


@pytest.mark.parametrize("link", [None, os.symlink, os.link], ids=["itself", "symlink", "hardlink"])
@pytest.mark.parametrize("number", [0, 1])
def test_the_model_is_never_replaced(link: Callable[[Path, Path], None] | None, number: int, tmp_path: Path) -> None:
    """Neither file of a split model, by none of its names."""
    shards = split(tiny_moe(), [4, 5], tmp_path)
    output = tmp_path / "out.expert-pack"
    for name in ("out.expert-pack", "out.expert-pack.manifest.json", *(f"out.expert-pack{s}" for s in OWN_NAMES)):
        path = tmp_path / name
        if link is None:  # the shard lies elsewhere, the model has a link to it
            shards[number].rename(path)
            shards[number].symlink_to(path)
        else:
            link(shards[number], path)
        before = contents(tmp_path)
        with pytest.raises(UsageError, match=r"is in the way|is a link to"):
            run(shards[0], output=output, force=True)
        assert contents(tmp_path) == before
        if link is None:
            path.replace(shards[number])
        else:
            path.unlink()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", ["", ".manifest.json", *OWN_NAMES])
def test_fifos_are_not_waited_for(suffix: str, model: Path) -> None:
    os.mkfifo(beside(model, suffix))
    for force in (False, True):
        with pytest.raises(ExpertPackError, match="it is a FIFO, not a regular file"):
            run(model, force=force)
    assert stat.S_ISFIFO(beside(model, suffix).lstat().st_mode)


def test_an_old_temporary_file_is_replaced(model: Path) -> None:
    for suffix in OWN_NAMES[2:]:
        beside(model, suffix).write_bytes(b"left by a crash")
    run(model)
    assert {path.name for path in model.parent.iterdir()} == {
        "model.gguf", "model.expert-pack", "model.expert-pack.manifest.json"
    }  # fmt: skip


def test_a_file_of_others_is_not_removed_when_writing_fails(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "a.tmp").symlink_to("victim")
    with pytest.raises(UsageError, match=r"a.tmp is in the way"):
        write_atomically(tmp_path / "a", b"new", Guard([]))
    assert contents(tmp_path) == {"victim": b"precious", "a.tmp": "victim"}


# ---- a link as the pack


def test_a_link_stays_and_the_pack_lands_where_it_leads(model: Path, tmp_path: Path) -> None:
    """Before the pack is there, and when it is replaced; it opens by both names."""
    disk = tmp_path / "disk"
    disk.mkdir()
    link = model.with_name("model.expert-pack")
    link.symlink_to("disk/big.expert-pack")
    for force in (False, True):
        result = run(model, force=force)
        assert (result.path, result.reused) == (link, False)
        assert link.is_symlink()
        assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "model.expert-pack", "disk"}
        assert {path.name for path in disk.iterdir()} == {"big.expert-pack", "big.expert-pack.manifest.json"}
        verify(link, deep=True, source=model)
        check_source(open_pack(disk / "big.expert-pack"), model)
    assert run(model).reused


def test_a_pack_and_a_manifest_that_are_links(model: Path, tmp_path: Path) -> None:
    pack = run(model).path
    disk = tmp_path / "disk"
    disk.mkdir()
    for path in (pack, manifest_of(pack)):
        path.rename(disk / path.name)
        path.symlink_to(disk / path.name)
    assert run(model).reused
    run(model, force=True)
    assert pack.is_symlink() and manifest_of(pack).is_symlink()
    verify(pack, deep=True, source=model)


def test_links_that_lead_to_no_pack(model: Path, tmp_path: Path) -> None:
    link = model.with_name("model.expert-pack")
    for target in ("victim", "loop.expert-pack", "model.expert-pack", "no/a.expert-pack"):
        (tmp_path / "victim").write_bytes(b"precious")
        (tmp_path / "loop.expert-pack").unlink(missing_ok=True)
        (tmp_path / "loop.expert-pack").symlink_to(link.name)
        link.symlink_to(target)
        before = contents(tmp_path)
        with pytest.raises(UsageError, match=r"is a link to|in the way|does not exist"):
            run(model, force=True)
        assert contents(tmp_path) == before
        link.unlink()


def test_a_manifest_of_its_own_beside_a_link(model: Path, tmp_path: Path) -> None:
    """It would be taken for that of the new pack."""
    pack = run(model).path
    (tmp_path / "disk").mkdir()
    pack.rename(tmp_path / "disk" / pack.name)
    pack.symlink_to(tmp_path / "disk" / pack.name)
    assert run(model).reused
    with pytest.raises(UsageError, match=r"is a link to .*, but .*manifest.json is not one to the manifest there"):
        run(model, force=True)
    verify(pack, deep=True, source=model)


# ---- names


def test_names_that_would_be_too_long(tmp_path: Path) -> None:
    longest = 255 - len(".expert-pack.manifest.json.tmp")
    run(tiny_moe().write(tmp_path / f"{'a' * longest}.gguf"))
    for n in (longest + 1, 230, 250):
        path = tiny_moe().write(tmp_path / f"{'b' * n}.gguf")
        with pytest.raises(UsageError, match=r"has too long a name: .* and 255 are allowed"):
            run(path)
        assert run(path, output=tmp_path / "short.expert-pack", force=True).pack_bytes
        with pytest.raises(UsageError, match=r"has too long a name"):
            run(path, output=tmp_path / f"{'c' * 300}.expert-pack")
        path.unlink()
    assert not list(tmp_path.glob("b*"))


# ---- permissions


@pytest.fixture
def umask() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name.removeprefix("model.expert-pack"): stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(
    ("of_model", "of_pack"), [(0o644, 0o644), (0o600, 0o600), (0o640, 0o640), (0o400, 0o600), (0o666, 0o644)]
)
def test_nobody_may_read_a_pack_who_may_not_read_the_model(
    of_model: int, of_pack: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it is written, and if an older version has left more."""
    shards = split(tiny_moe(), [4, 5], tmp_path)
    shards[1].chmod(of_model)
    seen: list[dict[str, int]] = []
    module = import_module("llama_expert_pack.pypack.convert.convert")
    real = module.write_atomically

    def write(path: Path, data: bytes, guard: Guard) -> None:
        real(path, data, guard)
        seen.append(modes(tmp_path))

    monkeypatch.setattr(module, "write_atomically", write)
    beside(shards[0], ".partial").touch(0o666)
    run(shards[0])
    assert seen[0][".partial"] == seen[0][".partial.json"] == of_pack
    assert modes(tmp_path)[""] == modes(tmp_path)[".manifest.json"] == of_pack


@pytest.mark.usefixtures("umask")
def test_the_umask_counts(model: Path) -> None:
    os.umask(0o077)
    run(model)
    assert modes(model.parent)[""] == modes(model.parent)[".manifest.json"] == 0o600


@pytest.mark.usefixtures("umask")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to anybody")
def test_who_may_read_the_model_may_read_its_pack(model: Path) -> None:
    """Root converts what a service reads as another user, or by its group."""
    os.chown(model, 12344, 12345)
    model.chmod(0o640)
    run(model)
    for suffix in ("", ".manifest.json"):
        info = Path(f"{model.with_suffix('.expert-pack')}{suffix}").stat()
        assert (info.st_uid, info.st_gid, info.st_mode & 0o777) == (12344, 12345, 0o640)


@pytest.mark.usefixtures("umask")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to any group")
def test_another_group_gets_only_what_all_others_may(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fchown", lambda *_: (_ for _ in ()).throw(PermissionError()))  # as for most users
    os.chown(model, -1, 12345)
    for of_model, of_pack in ((0o640, 0o600), (0o644, 0o644)):
        model.chmod(of_model)
        run(model, force=True)
        assert modes(model.parent)[""] == modes(model.parent)[".manifest.json"] == of_pack


# ---- what a stopped run with force has left


def test_a_partial_pack_beside_a_finished_one_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = run(model).path
    module = import_module("llama_expert_pack.pypack.convert.convert")

    class Stopped(BaseException):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(module._Run, "publish", stop)
        with pytest.raises(Stopped):
            run(model, force=True)
    left = beside(model, ".partial")
    assert left.stat().st_size == pack.stat().st_size
    result = run(model)
    assert (result.reused, result.leftover) == (True, left)
    assert left.exists()
    assert run(model, force=True).resumed_layers == 2
    left.write_bytes(bytes(10_000))
    assert run(model, restart=True).leftover is None
    assert not left.exists() and not beside(model, ".partial.json").exists()
    assert run(model).leftover is None


def test_force_is_not_named_where_it_does_not_help(model: Path) -> None:
    pack = beside(model, "")
    makes: list[Callable[[], None]] = [pack.mkdir, lambda: pack.hardlink_to(model)]
    for make in makes:
        make()
        with pytest.raises(UsageError, match=r"is in the way \(.*\): move it away, or choose another --output"):
            run(model)
        pack.rmdir() if pack.is_dir() else pack.unlink()
