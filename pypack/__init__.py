"""Expert packs: the routed experts of a GGUF, laid out for an SSD, read directly, cached in a budget."""

from pypack._version import __version__
from pypack.budget import parse_size, plan_pools
from pypack.cache import ExpertCache
from pypack.convert import Conversion, convert
from pypack.counters import ExpertStats
from pypack.errors import (
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
from pypack.inspect_pack import Description, describe
from pypack.manifest import Extent, Layer, Manifest, Role
from pypack.pack import Pack, find_pack, open_pack
from pypack.policy import POLICIES
from pypack.reader import Reader
from pypack.trace import Trace, read_trace
from pypack.verify import Verification, verify

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
    "convert",
    "describe",
    "find_pack",
    "open_pack",
    "parse_size",
    "plan_pools",
    "read_trace",
    "verify",
]
