"""Native code on fake devices, plainly and under two sanitizers: each of the programs says at its top what it tries."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from llama_expert_pack.bridge.library import library_dir
from llama_expert_pack.pypack.errors import NativeError

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
ROOMS = [NATIVE / "src" / name for name in ("base", "trace", "read", "store", "claim")]
OURS = [path for room in ROOMS for path in room.glob("expert_*.cpp")]
OPTIONS = ["-std=c++17", "-O1", "-g1", "-pthread", "-fno-access-control", "-U_FORTIFY_SOURCE", "-D_GLIBCXX_ASSERTIONS"]
SANITIZERS = ("plain", "thread", "address")
# how many stores it makes, or loads on each thread: about the same time for each sanitizer
HOW_MANY = {
    "loader_stress": {"plain": 32, "thread": 12, "address": 24},
    "claims_stress": {"plain": 400, "thread": 100, "address": 200},
    "sharing_stress": {"plain": 60, "thread": 12, "address": 30},
}
# any program will do: some compilers lack the library, some systems the address space
PROBE = "#include <thread>\nint main() { std::thread([] {}).join(); }\n"


def run(command: list[str], timeout_s: float) -> str:
    """What it printed. AssertionError with that if it failed."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, env=environment
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    for name in (os.environ.get("CXX", "g++"), "c++", "clang++"):
        if shutil.which(name):
            return [*(["ccache"] if shutil.which("ccache") else []), name]
    pytest.skip("no C++ compiler")


@pytest.fixture(scope="module")
def source() -> Path:
    """The llama.cpp source that was built last; only headers are used."""
    found = [path for path in ROOT.glob("build/*/source") if (path / "vendor/hash/xxhash/xxhash.h").exists()]
    if not found:
        pytest.skip(f"no llama.cpp source in {ROOT / 'build'}: `make build` puts it there")
    return max(found, key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="module")
def ggml() -> Path:
    """Only what is upstream's is used of it: our functions in the program come before those of a library."""
    try:
        return library_dir() / "libggml-base.so"
    except NativeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=SANITIZERS)
def built(
    request: pytest.FixtureRequest,
    compiler: list[str],
    source: Path,
    ggml: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Path]:
    """The sanitizer, and the folder of the programs that were compiled with it."""
    sanitizer, folder = request.param, tmp_path_factory.mktemp(request.param)
    options = [*OPTIONS, *([] if sanitizer == "plain" else [f"-fsanitize={sanitizer}"])]
    probe = folder / "probe"
    probe.with_suffix(".cpp").write_text(PROBE)
    try:
        run([compiler[-1], *options, f"{probe}.cpp", "-o", str(probe)], timeout_s=60)
        run([str(probe)], timeout_s=60)
    except AssertionError as error:
        if sanitizer == "plain":
            raise
        pytest.skip(f"no -fsanitize={sanitizer} here: {error}")

    folders = [NATIVE / "include", *ROOMS, source / "ggml/include", source / "ggml/src", source / "vendor/hash"]
    include = [f"-I{folder}" for folder in folders]

    def compiled(path: Path) -> str:
        out = folder / f"{path.stem}.o"
        run([*compiler, *options, *include, "-c", str(path), "-o", str(out)], timeout_s=200)
        return str(out)

    with ThreadPoolExecutor(2) as pool:
        ours = list(pool.map(compiled, OURS))
        programs = list(pool.map(compiled, [Path(__file__).with_name(f"{name}.cpp") for name in HOW_MANY]))
    link = ["-Wl,--wrap=pread", str(ggml), f"-Wl,-rpath,{ggml.parent}"]
    for program in programs:
        run([compiler[-1], *options, program, *ours, *link, "-o", program.removesuffix(".o")], timeout_s=60)
    return sanitizer, folder


@pytest.mark.parametrize("program", HOW_MANY)
def test_stress(program: str, built: tuple[str, Path]) -> None:
    sanitizer, programs = built
    with TemporaryDirectory() as folder:
        print(run([str(programs / program), folder, "1", str(HOW_MANY[program][sanitizer])], timeout_s=300))
