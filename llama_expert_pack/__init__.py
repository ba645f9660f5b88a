"""Run mixture-of-experts GGUF models that are larger than VRAM and RAM, from an expert pack on an SSD.

>>> from llama_expert_pack import Llama
>>> llm = Llama("model.gguf", expert_pack=True, expert_cache="20GiB")

All else that the package offers works where its native part is missing or cannot run.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .bridge import library as _library
from .pypack._version import __version__
from .pypack.command.inspect import Description, describe
from .pypack.convert.convert import Conversion, convert
from .pypack.convert.verify import Verification, verify
from .pypack.drive.reader import Reader
from .pypack.errors import (
    BudgetError,
    DecodeError,
    DirectIOError,
    ExpertPackError,
    GGUFError,
    NativeError,
    PackError,
    ReadError,
    SourceMismatchError,
    SpaceError,
    TraceError,
    UsageError,
)
from .pypack.format.layout import Extent, Layer, Role
from .pypack.format.manifest import Manifest
from .pypack.format.pack import Pack, open_pack
from .pypack.placement.budget import plan_pools
from .pypack.placement.cache import ExpertCache
from .pypack.policy.registry import POLICIES
from .pypack.source.match import check_source, find_pack
from .pypack.stats.counters import ExpertStats
from .pypack.trace.trace import Trace, read_trace
from .pypack.values.sizes import parse_size

if TYPE_CHECKING:
    from .bridge.llama import Llama

__all__ = [
    "POLICIES",
    "BudgetError",
    "Conversion",
    "DecodeError",
    "Description",
    "DirectIOError",
    "ExpertCache",
    "ExpertPackError",
    "ExpertStats",
    "Extent",
    "GGUFError",
    "Layer",
    "Llama",
    "Manifest",
    "NativeError",
    "Pack",
    "PackError",
    "ReadError",
    "Reader",
    "Role",
    "SourceMismatchError",
    "SpaceError",
    "Trace",
    "TraceError",
    "UsageError",
    "Verification",
    "__version__",
    "check_source",
    "convert",
    "describe",
    "find_pack",
    "open_pack",
    "parse_size",
    "plan_pools",
    "read_trace",
    "verify",
]

with suppress(NativeError):  # whoever needs it is told why
    _library.offer()


def __getattr__(name: str) -> Any:
    """``Llama`` needs the native part, so it is loaded when it is first asked for. Raises NativeError."""
    if name != "Llama":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .bridge.llama import Llama

    return Llama


def __dir__() -> list[str]:
    return __all__
