"""Wrong machine, wrong binding, wrong libraries: one sentence that says what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.stock import STOCK_LIB
from llama_expert_pack.bridge import library
from llama_expert_pack.pypack.errors import NativeError
from tests.runtime.packed import run_python


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What was found out before is forgotten, then and afterwards."""
    for cached in (library.load, library.library_dir):
        cached.cache_clear()
    yield
    for cached in (library.load, library.library_dir):
        cached.cache_clear()


def only_line(call: object) -> str:
    with pytest.raises(NativeError) as caught:
        call()  # type: ignore[operator]
    text = str(caught.value)
    assert "\n" not in text
    return text


CPUINFO = "processor\t: 0\nflags\t\t: fpu sse4_2 avx fma f16c\nbugs\t\t: spectre_v1\n"


def test_missing_cpu_features_are_named() -> None:
    text = only_line(lambda: library.check_cpu(["SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"], CPUINFO))
    assert "a processor with AVX2, BMI2, which this one lacks" in text
    assert "make clean build" in text
    library.check_cpu(["SSE42", "AVX", "FMA"], CPUINFO)


def test_a_processor_that_lists_no_flags_is_not_judged() -> None:
    library.check_cpu(["AVX2"], "Processor\t: AArch64\nFeatures\t: fp asimd\n")


def test_every_feature_of_this_build_can_be_checked() -> None:
    features = library.build_info()["cpu_features"]
    assert features and set(features) <= set(library._CPU_FLAGS)
    library.check_cpu(features, Path("/proc/cpuinfo").read_text())


def needed_version() -> str:
    """The binding that this package asks pip for."""
    requirements = importlib.metadata.requires("llama-expert-pack") or []
    (version,) = (line.split("==")[1] for line in requirements if line.startswith("llama-cpp-python=="))
    return version


def test_another_version_of_the_binding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.2")
    text = only_line(library.load)
    needed = needed_version()
    assert text == f"llama-cpp-python {needed} is needed, 0.3.2 is installed: pip install llama-cpp-python=={needed}"


def test_no_binding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert f"none is installed: pip install llama-cpp-python=={needed_version()}" in only_line(library.load)


def test_a_package_without_its_native_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    """The folder is named: it may be a clone's, in front of what is installed."""
    folder = Path(library.__file__).parent
    assert only_line(library.load).startswith(f"{folder}: the native part of llama-expert-pack is not built: ")


@pytest.mark.parametrize("built", [[], ["libggml.so"]])
def test_libraries_that_are_not_there(built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provider_beside(tmp_path, monkeypatch, built)
    text = only_line(library.load)
    assert str(tmp_path / "lib") in text
    assert "expected libllama.so" in text


@pytest.mark.parametrize("info", [None, "", "{", b"\xff".decode("latin-1")])
def test_build_info_that_cannot_be_read(info: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provider_beside(tmp_path, monkeypatch, ["libllama.so"])
    if info is not None:
        (tmp_path / "lib" / "build_info.json").write_text(info, encoding="latin-1")
    assert f"{tmp_path / 'lib' / 'build_info.json'}: can't be read" in only_line(library.load)


def test_libraries_for_a_larger_processor_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check comes before the libraries, which would die of SIGILL."""
    provider_beside(tmp_path, monkeypatch, ["libllama.so"])
    (tmp_path / "lib" / "build_info.json").write_text(json.dumps({"cpu_features": ["AVX2", "AVX512_BF16_X"]}))
    monkeypatch.setitem(library._CPU_FLAGS, "AVX512_BF16_X", "no_processor_has_this")
    assert "a processor with AVX512_BF16_X" in only_line(library.load)


def provider_beside(folder: Path, monkeypatch: pytest.MonkeyPatch, libraries: list[str]) -> None:
    """Lets the package look for its libraries in folder / "lib"."""
    (folder / "lib").mkdir()
    for name in libraries:
        (folder / "lib" / name).write_bytes(b"")
    spec = importlib.util.spec_from_file_location("llama_expert_pack.bridge._provider", folder / "_provider.so")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


IMPORT = """
try:
    from llama_expert_pack import Llama
except Exception as error:
    print(f"{type(error).__module__}.{type(error).__name__}: {error}")
else:
    print("imported", Llama.__module__)
"""


def test_llama_cpp_with_other_libraries_was_first() -> None:
    run = run_python(f"import llama_cpp\n{IMPORT}", stock=True)
    (line,) = run.stdout.splitlines()
    assert line.startswith("llama_expert_pack.pypack.errors.NativeError: llama_cpp was imported earlier with ")
    assert line.endswith(
        "import llama_expert_pack before llama_cpp, and without LLAMA_CPP_LIB_PATH, so that both use the patched libraries"
    )
    assert str((STOCK_LIB / "libllama.so").resolve()) in line


def test_another_library_path_in_the_environment_does_not_matter() -> None:
    assert run_python(IMPORT, stock=True).stdout == "imported llama_expert_pack.bridge.llama\n"


def test_llama_cpp_may_follow() -> None:
    code = "import llama_expert_pack, llama_cpp; print(issubclass(llama_expert_pack.Llama, llama_cpp.Llama))"
    assert run_python(code).stdout == "True\n"


def test_a_binding_with_other_structs_is_refused() -> None:
    code = (
        "import ctypes, llama_expert_pack.bridge.library as library; llama_cpp = library.load()\n"
        "class params(ctypes.Structure): _fields_ = [('x', ctypes.c_int)]\n"
        "llama_cpp.llama_model_params = params\n"
        "try: library.check_struct_sizes(llama_cpp, llama_cpp.llama_cpp._lib)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    found = run_python(code).stdout
    assert found.startswith("NativeError llama-cpp-python and the libraries in ")
    assert "llama_model_params has 4 and " in found
