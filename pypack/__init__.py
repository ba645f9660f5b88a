"""Expert packs: the routed experts of a GGUF, laid out for an SSD, read directly, cached in a budget."""

from pypack._version import __version__
from pypack.convert import Conversion, convert
from pypack.errors import (
    BudgetError,
    DirectIOError,
    ExpertPackError,
    GGUFError,
    NativeError,
    PackError,
    ReadError,
    SourceMismatchError,
    SpaceError,
    UsageError,
)
from pypack.inspect_pack import Description, describe
from pypack.manifest import Extent, Layer, Manifest, Role
from pypack.pack import Pack, find_pack, open_pack
from pypack.verify import Verification, verify

__all__ = [
    "BudgetError",
    "Conversion",
    "Description",
    "DirectIOError",
    "ExpertPackError",
    "Extent",
    "GGUFError",
    "Layer",
    "Manifest",
    "NativeError",
    "Pack",
    "PackError",
    "ReadError",
    "Role",
    "SourceMismatchError",
    "SpaceError",
    "UsageError",
    "Verification",
    "__version__",
    "convert",
    "describe",
    "find_pack",
    "open_pack",
    "verify",
]
