"""What the package offers is what it says it offers."""

from __future__ import annotations

import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import pypack
from pypack import errors

MODULES = sorted(path.stem for path in Path(pypack.__file__).parent.glob("[!_]*.py"))


def test_all_equals_the_exports() -> None:
    exported = {
        name
        for name, value in vars(pypack).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(pypack.__all__) - {"__version__"} == exported
    assert len(set(pypack.__all__)) == len(pypack.__all__)


def test_every_error_is_exported_and_in_the_tree() -> None:
    assert set(errors.__all__) <= set(pypack.__all__)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.ExpertPackError)
        assert name in str(errors.__doc__)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for(name: str) -> None:
    assert (import_module(f"pypack.{name}").__doc__ or "").strip()


def test_no_foreign_function_library_is_loaded() -> None:
    """The bridge may use cffi; the package must work where there is nothing but Python."""
    code = (
        "import sys, pypack.cli, "
        + ", ".join(f"pypack.{name}" for name in MODULES)
        + "; print([m for m in ('cffi', 'llama_cpp', 'torch', 'bridge') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


@pytest.mark.parametrize("name", MODULES)
def test_no_module_imports_a_foreign_function_library(name: str) -> None:
    source = Path(pypack.__file__).with_name(f"{name}.py").read_text()
    for library in ("ctypes", "cffi", "llama_cpp", "bridge"):
        assert f"import {library}" not in source
        assert f"from {library}" not in source
