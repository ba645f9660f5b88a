"""native/check_needs.sh: everything that is missing in one message, with the packages that bring it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "native" / "check_needs.sh"
TOOLS = ("sh", "uname", "basename", "mktemp", "rm", "env", "dirname")
COMPILERS = ("gcc", "g++", "as", "ld")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder of commands, as the only one on the path: a machine that has all that is needed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in (*TOOLS, *COMPILERS, "git"):
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    return folder


def python_without(folder: Path, name: str, statement: str) -> None:
    """A Python in which a statement has run before anything else."""
    script = folder / name
    script.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -c "{statement}\n$1"\n')
    script.chmod(0o755)


def check(machine: Path, *needs: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(machine), "CC": "gcc", "CXX": "g++", "PYTHON": sys.executable, **variables}
    return subprocess.run(
        ["/bin/sh", str(SCRIPT), *needs], env=environment, capture_output=True, text=True, check=False
    )


def test_a_machine_with_everything_passes_in_silence(machine: Path) -> None:
    done = check(machine, "venv")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("command", "said", "package"),
    [("gcc", "a C compiler: gcc", "gcc"), ("g++", "a C++ compiler: g++", "g++"), ("git", "git, which", "git")],
)
def test_a_missing_command_is_named_with_its_package(machine: Path, command: str, said: str, package: str) -> None:
    (machine / command).unlink()
    done = check(machine)
    assert done.returncode == 1
    assert f"- {said}" in done.stderr
    assert f"sudo apt install {package}\n" in done.stderr
    assert "Then run the same command again." in done.stderr


def test_all_that_is_missing_comes_in_one_message(machine: Path) -> None:
    for command in ("gcc", "g++", "git"):
        (machine / command).unlink()
    done = check(machine, "cuda", PYTHON="python3", CUDACXX="nvcc-none")
    assert done.stderr.count("error:") == 1
    assert done.stderr.count("\n  - ") == 5 - Path("/usr/local/cuda/bin/nvcc").exists()
    assert "sudo apt install python3 python3-venv python3-dev gcc g++ git" in done.stderr
    assert "sudo dnf install python3 python3-devel gcc gcc-c++ git" in done.stderr


def test_a_compiler_without_its_libraries_is_found_out(machine: Path) -> None:
    (machine / "g++").unlink()
    (machine / "g++").symlink_to(shutil.which("false") or "")
    assert "g++ is missing or can't build a program" in check(machine).stderr


@pytest.mark.parametrize("name", ["python3", "python3.12"])
def test_headers_and_venv_of_the_python_that_is_used(machine: Path, name: str) -> None:
    python_without(
        machine,
        name,
        "import sys, sysconfig; sys.modules['ensurepip'] = None; sysconfig.get_path = lambda name: '/nowhere'",
    )
    done = check(machine, "venv", PYTHON=name)
    assert f"{name} has no venv with ensurepip" in done.stderr
    assert "there is no /nowhere/Python.h" in done.stderr
    assert f"sudo apt install {name}-venv {name}-dev\n" in done.stderr


def test_an_old_python(machine: Path) -> None:
    python_without(machine, "python3", "import sys; sys.version_info = (3, 9)")
    assert "Python 3.10 or later: python3 is older" in check(machine, PYTHON="python3").stderr


def test_a_compiler_command_may_have_arguments(machine: Path) -> None:
    assert check(machine, CC="env gcc", CXX="env g++", LANG=os.environ.get("LANG", "C")).returncode == 0
