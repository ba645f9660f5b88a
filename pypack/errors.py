"""Every error that llama-expert-pack raises on purpose.

ExpertPackError           one clear sentence; the CLI prints it and exits 1
├── GGUFError             a model file that is not a valid GGUF, or not one that can be packed
├── PackError             a pack, its manifest or its index is missing, unfinished, damaged or inconsistent
├── SourceMismatchError   a pack (or a half-done conversion) belongs to another model
├── BudgetError           a memory budget that cannot be read or cannot be met
├── DirectIOError         a file system or device that cannot do what direct I/O needs
├── ReadError             the operating system refused a read or a write (carries ``errno``)
├── SpaceError            not enough room on the disk
├── DecodeError           a decode failed because an expert could not be brought in
├── TraceError            a trace that is damaged, cut off, or not a trace
├── UsageError            options or paths that contradict each other or what is on the disk
└── NativeError           the native library is missing, too old, or has another ABI
"""

from __future__ import annotations

from .printable import printable


class ExpertPackError(Exception):
    """Base of all errors of this package; its text is one sentence for a person, safe to print."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class GGUFError(ExpertPackError):
    """The model file is not a valid GGUF, or holds nothing that can be packed."""


class PackError(ExpertPackError):
    """The pack, its manifest or its index is missing, unfinished, damaged or inconsistent."""


class SourceMismatchError(ExpertPackError):
    """The pack was made from another model than the one given."""


class BudgetError(ExpertPackError):
    """A memory budget cannot be read, or is too small for the model."""


class DirectIOError(ExpertPackError):
    """Direct I/O is not possible here."""


class ReadError(ExpertPackError):
    """The operating system refused a read or write; ``errno`` says why (0 if the data just ended)."""

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno


class SpaceError(ExpertPackError):
    """The disk has not enough free space."""


class TraceError(ExpertPackError):
    """A recorded trace is damaged or cut off, is not a trace, or lacks what was asked of it."""


class UsageError(ExpertPackError):
    """The options given contradict each other or what is on the disk."""


class NativeError(ExpertPackError):
    """The native library cannot be loaded or speaks another ABI."""


class DecodeError(ExpertPackError, RuntimeError):
    """A decode failed because an expert could not be brought in; nothing was computed with wrong bytes."""
