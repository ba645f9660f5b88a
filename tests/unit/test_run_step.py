"""native/run_step.py: what a person sees of a build step, and why one failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "native" / "run_step.py"


def run(log: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(log), "a title", "sh", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_count_and_parts_are_shown_and_the_rest_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "step.log"
    done = run(
        log, "echo '  -- part: HTTPS: off'; echo noise; for i in 1 2 3 4; do echo \"  [$i/4] Building $i\"; done"
    )
    assert done.returncode == 0 and done.stderr == ""
    shown = done.stdout.splitlines()
    assert shown[:2] == ["a title", "  part: HTTPS: off"]
    assert [line.split(",")[0] for line in shown[2:6]] == [f"  {i} of 4 files" for i in (1, 2, 3, 4)]
    assert shown[6].startswith("  done in ") and len(shown) == 7
    assert "noise\n" in log.read_text() and "[4/4] Building 4" in log.read_text()


def test_a_command_that_does_not_compile_is_shown_in_its_compilers_words(tmp_path: Path) -> None:
    done = run(tmp_path / "log", "echo '[1/2] a'; echo 'FAILED: [code=1] b.o'; echo 'b.c:1: error: no'; echo; exit 3")
    assert done.returncode == 3
    assert "b.c:1: error: no" in done.stderr and "[1/2]" not in done.stderr
    assert done.stderr.rstrip().endswith(f"error: a file did not compile; all is in {tmp_path / 'log'}")


def test_our_own_sentence_is_the_whole_message(tmp_path: Path) -> None:
    script = (
        "printf '  error: this machine lacks what the build needs:\\n    - git: gone\\n    Debian, Ubuntu:  sudo apt install git\\n';"
        "echo '  CMake Error at needs.cmake:3'; echo 'error: metadata-generation-failed'; exit 1"
    )
    done = run(tmp_path / "log", script)
    assert done.stderr.splitlines() == [
        "error: this machine lacks what the build needs:",
        "  - git: gone",
        "  Debian, Ubuntu:  sudo apt install git",
    ]


def test_without_network_there_is_one_sentence(tmp_path: Path) -> None:
    script = (
        "for i in 1 2 3; do echo 'WARNING: Retrying: NewConnectionError: Failed to establish a new connection'; done;"
        "echo 'ERROR: No matching distribution found for ninja'; exit 1"
    )
    done = run(tmp_path / "log", script)
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: packages can't be downloaded: connect to a Python package index")


def test_anything_else_ends_with_its_last_lines(tmp_path: Path) -> None:
    done = run(tmp_path / "log", "seq 100; exit 1")
    lines = done.stderr.splitlines()
    assert lines[0] == "61" and lines[-2] == "100" and lines[-1].startswith("error: this step failed")
