"""The wheel in an empty environment, beside files of somebody else that have the names of our folders."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from lab.stock import ROOT

SAMPLE = ROOT / "bench" / "data" / "sample-moe.gguf"
GENERATES = """
import sys
from llama_expert_pack import Llama, convert, open_pack
model = sys.argv[1]
pack = open_pack(convert(model, safety_margin_bytes=0).path)
llm = Llama(model, expert_pack=True, expert_cache=pack.payload_bytes // 4, n_ctx=64, n_batch=16, verbose=False)
print(llm.create_completion("Elizabeth walked", max_tokens=4, temperature=0)["usage"]["completion_tokens"], llm.expert_stats().misses > 0)
"""
WITHOUT_NATIVE = """
import sys
import llama_expert_pack as package
print(package.__version__, package.describe(sys.argv[1]).n_experts)
try:
    package.Llama
except package.NativeError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clone's wheel, out of the build folder that the clone's own build left."""
    built = next(path for path in sorted((ROOT / "build").glob("cp*")) if (path / "CMakeCache.txt").exists())
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-C", f"build-dir={built}", "-w", out, ROOT], check=True)
    return next(out.glob("*.whl"))


@pytest.fixture
def environment(wheel: Path, tmp_path: Path) -> Path:
    """An environment with nothing but the wheel, and the libraries it needs from this one."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    # a path alone: what makes this environment's own package editable is not run there
    (packages_of(folder) / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of somebody else's, with our folders' names in it."""
    folder = tmp_path / "somebody"
    for name in ("bridge", "pypack", "native", "lab"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise SystemExit('{name} of somebody else was imported')\n")
    (folder / "bridge.py").write_text("raise SystemExit('bridge.py of somebody else was imported')\n")
    (folder / "model.gguf").symlink_to(SAMPLE)
    return folder


def packages_of(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def run(environment: Path, folder: Path, code: str) -> str:
    script = folder / "script.py"
    script.write_text(code)
    command = [environment / "bin/python", script, folder / "model.gguf"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_name_is_installed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"llama_expert_pack"}
    assert "llama_expert_pack/py.typed" in names
    assert "llama_expert_pack/pypack/format/pack.py" in names
    assert any(name.startswith("llama_expert_pack/bridge/lib/libllama.so") for name in names)


def test_it_runs_beside_files_of_the_same_names(environment: Path, elsewhere: Path) -> None:
    assert run(environment, elsewhere, GENERATES) == "4 True\n"
    for command in ("expert-pack verify model.gguf.expert-pack", "expert-pack --help", "llama-server --version"):
        name, *arguments = command.replace("model.gguf.", "model.").split()
        subprocess.run([environment / "bin" / name, *arguments], cwd=elsewhere, check=True, capture_output=True)


@pytest.mark.parametrize("damage", ["missing", "cannot run"])
def test_pack_tools_need_no_native_part(environment: Path, elsewhere: Path, damage: str) -> None:
    bridge = packages_of(environment) / "llama_expert_pack" / "bridge"
    for module in bridge.glob("_*.so"):
        module.unlink() if damage == "missing" else module.write_bytes(b"for another machine")
    version, sentence = run(environment, elsewhere, WITHOUT_NATIVE).splitlines()
    assert version.endswith(" 256")
    assert "reinstall llama-expert-pack on this machine" in sentence
    inspect = [str(environment / "bin/expert-pack"), "inspect", "model.gguf"]
    assert "256" in subprocess.run(inspect, cwd=elsewhere, check=True, capture_output=True, text=True).stdout
    server = [str(environment / "bin/llama-server"), "-m", "model.gguf"]
    done = subprocess.run(server, cwd=elsewhere, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
