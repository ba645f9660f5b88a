"""Full disks, read-only folders and file size limits: one sentence, and nothing left behind that could mislead.

Each case runs the command in a mount namespace of its own, where a small tmpfs can be filled or made read-only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import check_source
from tests.gguf_bytes import tiny_moe
from tests.pack_tools import manifest_of


def in_namespace(script: str, disk: Path, *patches: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell script as (a possibly fake) root; ``$DISK`` is an empty folder to mount on, ``$EXPERT_PACK`` runs
    the command, after the Python statements ``patches``."""
    code = "\n".join(
        ["import os, errno, resource", *patches, "from llama_expert_pack.pypack.command.cli import main", "main()"]
    )
    disk.mkdir(exist_ok=True)
    env = os.environ | {
        "DISK": str(disk),
        "EXPERT_PACK": f"{sys.executable} {(disk.parent / 'command.py')}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    (disk.parent / "command.py").write_text(code)
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return subprocess.run(
        ["unshare", "--mount", *user, "sh", "-e", "-c", script], env=env, capture_output=True, text=True
    )


def only_error(run: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in run.stderr.splitlines() if not line.startswith("convert: ")]
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


EVERY_LAYER = "import sys, llama_expert_pack.pypack.convert.convert; sys.modules['llama_expert_pack.pypack.convert.convert'].CHECKPOINT_INTERVAL_S = 0"
NO_SPACE_CHECK = (
    "from llama_expert_pack.pypack.convert.pack_output import PackOutput; PackOutput.check_space = lambda *a: None"
)
NO_RESERVE = "from llama_expert_pack.pypack.convert.partial_pack import PartialPack; PartialPack.reserve = lambda self, n: os.ftruncate(self._fd, n)"


def test_full_disk_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    model = tiny_moe().write(tmp_path / "model.gguf")
    run = in_namespace(
        f"mount -t tmpfs -o size=200k tmpfs $DISK; cd $DISK; "
        f"$EXPERT_PACK convert {model} --output . --safety-margin-gib 0 || echo $?; ls -A",
        tmp_path / "disk",
    )
    assert "0.00 GiB free, but model.expert-pack needs 0.00 GiB more" in only_error(run)
    assert run.stdout == "1\n"


def test_disk_that_is_full_when_room_is_reserved(tmp_path: Path) -> None:
    """Somebody else took the space between the check and the reservation."""
    model = tiny_moe().write(tmp_path / "model.gguf")
    run = in_namespace(
        f"mount -t tmpfs -o size=200k tmpfs $DISK; cd $DISK; "
        f"$EXPERT_PACK convert {model} --output . --safety-margin-gib 0 || echo $?; ls -A",
        tmp_path / "disk",
        NO_SPACE_CHECK,
    )
    assert "the disk is full while writing model.expert-pack.partial: free some space" in only_error(run)
    assert run.stdout == "1\n"


def test_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    """Where nothing can be reserved: finished layers stay, and the same command goes on with more room."""
    model = tiny_moe(n_block=8).write(tmp_path / "model.gguf")  # 128 KiB a layer
    expected = convert(model, tmp_path / "model.expert-pack", safety_margin_bytes=0).path
    convert_it = f"$EXPERT_PACK convert {model} --output . --safety-margin-gib 0 --jobs 1"
    run = in_namespace(
        f"mount -t tmpfs -o size=860k tmpfs $DISK; cd $DISK; {convert_it} || echo $?; ls -A; "
        f"mount -o remount,size=2m $DISK; {convert_it}; ls -A; "
        f"cmp model.expert-pack {expected}; cmp model.expert-pack.manifest.json {manifest_of(expected)}",
        tmp_path / "disk",
        EVERY_LAYER,
        NO_SPACE_CHECK,
        NO_RESERVE,
    )
    assert run.returncode == 0, run.stderr
    assert "the disk is full while writing model.expert-pack.partial" in only_error(run)
    assert "what was written is kept: run the same command again to go on" in run.stderr
    before, finished, after = run.stdout.splitlines()[:3], run.stdout.splitlines()[3], run.stdout.splitlines()[4:]
    assert before == ["1", "model.expert-pack.partial", "model.expert-pack.partial.json"]
    assert re.fullmatch(r"model.expert-pack is complete \(\d+ bytes, [1-6] layers were there already\)", finished)
    assert after == ["model.expert-pack", "model.expert-pack.manifest.json"]


def test_file_size_limit(tmp_path: Path) -> None:
    """As on file systems that allow no large files."""
    model = tiny_moe().write(tmp_path / "model.gguf")
    run = in_namespace(
        f"cd $DISK; $EXPERT_PACK convert {model} --output . --safety-margin-gib 0 || echo $?; ls -A",
        tmp_path / "disk",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))",
    )
    assert "allows no file this large" in only_error(run)
    assert run.stdout == "1\n"


def test_read_only_folder(tmp_path: Path) -> None:
    """Nothing is written beside such a model, but --output puts the pack elsewhere."""
    disk = tmp_path / "disk"
    disk.mkdir()
    model = tiny_moe().write(disk / "model.gguf")
    out = tmp_path / "out"
    out.mkdir()
    run = in_namespace(
        f"mount --bind $DISK $DISK; mount -o remount,bind,ro $DISK; "
        f"$EXPERT_PACK convert {model} --safety-margin-gib 0 || echo $?; ls -A $DISK; "
        f"$EXPERT_PACK convert {model} --safety-margin-gib 0 --output {out}",
        disk,
    )
    assert f"folder {disk} is read-only: choose a folder you may write to with --output" in only_error(run)
    assert run.stdout.splitlines()[:2] == ["1", "model.gguf"]
    check_source(open_pack(out / "model.expert-pack"), model)


def test_finished_pack_in_a_read_only_folder_is_reused(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    model = tiny_moe().write(disk / "model.gguf")
    convert(model, safety_margin_bytes=0)
    run = in_namespace(f"mount --bind $DISK $DISK; mount -o remount,bind,ro $DISK; $EXPERT_PACK convert {model}", disk)
    assert (run.returncode, run.stderr) == (0, "")
    assert "is already complete" in run.stdout


def test_file_system_without_direct_io(tmp_path: Path) -> None:
    """ramfs has neither O_DIRECT nor reservation: the page cache is used on both sides, the result is the same."""
    model = tiny_moe().write(tmp_path / "model.gguf")
    expected = convert(model, tmp_path / "model.expert-pack", safety_margin_bytes=0).path
    run = in_namespace(
        f"mount -t ramfs ramfs $DISK; cd $DISK; cp -p {model} .; "
        "$EXPERT_PACK convert model.gguf --safety-margin-gib 0; ls -A; "
        "$EXPERT_PACK verify model.expert-pack --deep --source model.gguf >&2; "
        f"cmp model.expert-pack {expected}; cmp model.expert-pack.manifest.json {manifest_of(expected)}",
        tmp_path / "disk",
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[1:] == ["model.expert-pack", "model.expert-pack.manifest.json", "model.gguf"]
