"""What the package offers is what it says it offers, and it keeps to its rooms."""

from __future__ import annotations

import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import llama_expert_pack
from llama_expert_pack.pypack import errors

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(("llama_expert_pack", *path.relative_to(ROOT).with_suffix("").parts))
    for path in (ROOT / "pypack").rglob("*.py")
    if path.stem != "__init__"
)


def test_all_equals_the_exports() -> None:
    exported = {
        name
        for name, value in vars(llama_expert_pack).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    of_others = {"TYPE_CHECKING", "Any", "annotations", "suppress"}
    assert set(llama_expert_pack.__all__) - {"__version__", "Llama"} == exported - of_others - {"Llama"}
    assert sorted(llama_expert_pack.__all__) == sorted(set(llama_expert_pack.__all__)) == sorted(dir(llama_expert_pack))


def test_every_error_is_exported_and_in_the_tree() -> None:
    found = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert len(found) > 1 and found.keys() <= set(llama_expert_pack.__all__)
    for name, value in found.items():
        assert issubclass(value, errors.ExpertPackError)
        assert name in str(errors.__doc__)


def public_members(value: object) -> dict[str, object]:
    """A class's own methods and properties by name; fields are told of in its docstring."""
    own = vars(value) if isinstance(value, type) else {}
    return {
        name: member
        for name, member in own.items()
        if not name.startswith("_") and isinstance(member, types.FunctionType | property | classmethod | staticmethod)
    }


@pytest.mark.parametrize("name", sorted({*llama_expert_pack.__all__} - {"POLICIES", "__version__"}))
def test_what_is_offered_says_what_it_does(name: str) -> None:
    value = getattr(llama_expert_pack, name)
    assert value.__doc__ and not value.__doc__.startswith(f"{name}("), "a dataclass's own docstring says nothing"
    assert [member for member, found in public_members(value).items() if not found.__doc__] == []


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for(name: str) -> None:
    assert (import_module(name).__doc__ or "").strip()


def test_no_foreign_function_library_is_loaded() -> None:
    """The bridge may use cffi; the package must work where there is nothing but Python."""
    code = (
        f"import sys, {', '.join(MODULES)}; "
        "print([m for m in sys.modules if m in ('cffi', 'llama_cpp', 'torch', 'llama_expert_pack.bridge.llama')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
