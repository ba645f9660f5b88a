"""The native loader on fake devices, plainly and under two sanitizers: see loader_stress.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bridge.library import library_dir
from pypack.errors import NativeError

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
STRESS = Path(__file__).with_name("loader_stress.cpp")
OURS = [NATIVE / "src" / f"expert_{name}.cpp" for name in ("store", "acquire", "load", "read", "trace", "trust")]
OPTIONS = ["-std=c++17", "-O1", "-g1", "-pthread", "-fno-access-control", "-U_FORTIFY_SOURCE", "-D_GLIBCXX_ASSERTIONS"]
# how many stores it makes: about the same time for each
N_STORES = {"plain": 32, "thread": 12, "address": 24}
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


@pytest.mark.parametrize("sanitizer", N_STORES)
def test_loader(sanitizer: str, compiler: list[str], source: Path, ggml: Path, tmp_path: Path) -> None:
    options = [*OPTIONS, *([] if sanitizer == "plain" else [f"-fsanitize={sanitizer}"])]
    probe = tmp_path / "probe"
    probe.with_suffix(".cpp").write_text(PROBE)
    try:
        run([compiler[-1], *options, f"{probe}.cpp", "-o", str(probe)], timeout_s=60)
        run([str(probe)], timeout_s=60)
    except AssertionError as error:
        if sanitizer == "plain":
            raise
        pytest.skip(f"no -fsanitize={sanitizer} here: {error}")

    folders = [NATIVE / "include", NATIVE / "src", source / "ggml/include", source / "ggml/src", source / "vendor/hash"]
    include = [f"-I{folder}" for folder in folders]

    def compiled(path: Path) -> str:
        out = tmp_path / f"{path.stem}.o"
        run([*compiler, *options, *include, "-c", str(path), "-o", str(out)], timeout_s=200)
        return str(out)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, [STRESS, *OURS]))
    program = tmp_path / "loader_stress"
    link = ["-Wl,--wrap=pread", str(ggml), f"-Wl,-rpath,{ggml.parent}"]
    run([compiler[-1], *options, *objects, *link, "-o", str(program)], timeout_s=60)
    with TemporaryDirectory() as folder:
        print(run([str(program), folder, "1", str(N_STORES[sanitizer])], timeout_s=300))
