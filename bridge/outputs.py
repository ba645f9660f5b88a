"""What a run writes beside its answers: its statistics and its trace. Never over its model or its pack."""

from __future__ import annotations

import hashlib
import os
import stat
import urllib.parse
from pathlib import Path
from typing import Any

from ..pypack.errors import UsageError
from ..pypack.format.pack import Pack, manifest_path
from ..pypack.gguf.model import SHARD_NAME
from ..pypack.system.output_file import open_output, refuse_same_file, what_to_give
from ..pypack.trace.format import MAGIC
from ..pypack.values.options import ExpertOptions
from ._provider import ffi, lib

_CHILD_NAME_MAX = 100  # of 255 bytes that a file's name may have


class TraceFile:
    """The file of a trace, locked until it is closed. A server that sleeps and wakes gives it to one store after another:
    one run, one trace."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self._fd = -1
        self._pid = os.getpid()
        self._header = b""
        self._trace: Any = ffi.NULL

    def begin(self, header: bytes) -> Any:
        """The native trace of a store whose model has this header. Raises :class:`UsageError`."""
        if self._fd < 0:
            self._open(header)
        elif header != self._header:
            raise UsageError(
                f"{self.path}: the expert trace was begun with another model or policy, and can't go on with this one: "
                "start the server again"
            )
        return self._trace

    def close(self) -> None:
        """After the stores are freed. Further calls do nothing. In a forked child the trace is left to the parent."""
        if os.getpid() == self._pid:
            lib.expert_trace_free(self._trace)
        self._trace = ffi.NULL
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, header: bytes) -> None:
        try:
            self._fd = open_output(self.path, _is_trace, "an expert trace")
            os.ftruncate(self._fd, 0)
            with open(self._fd, "wb", closefd=False) as file:
                file.write(header)
        except OSError as error:
            self.close()
            raise UsageError(
                f"{self.path}: the expert trace can't be written: {error.strerror}; {what_to_give(error)}"
            ) from error
        self._header = header
        self._trace = lib.expert_trace_new(self._fd, os.fsencode(self.path))


def _is_trace(head: bytes) -> bool:
    return head.startswith(MAGIC)


def check_outputs(model_path: str, pack: Pack, options: ExpertOptions) -> None:
    """Raises :class:`UsageError` if writing an output that the options name would destroy a file of the model, of the pack,
    or the other output."""
    outputs = {"expert_trace": options.expert_trace, "expert_stats_path": options.expert_stats_path}
    given = {option: path for option, path in outputs.items() if path is not None}
    if given:
        inputs: dict[str, str | Path] = {"the model": model_path, **_other_shards(Path(model_path))}
        inputs |= {"the pack": pack.path, "the pack's manifest": manifest_path(pack.path)}
        refuse_same_file(given, inputs)


def _other_shards(path: Path) -> dict[str, Path]:
    match = SHARD_NAME.match(path.name)
    count = int(match["count"]) if match else 0
    names = [f"{match['prefix']}-{no:05d}-of-{count:05d}.gguf" for no in range(2, count + 1)] if match else []
    return {f"shard {name} of the model": path.with_name(name) for name in names}


def path_of_child(path: str, child: str | None) -> str:
    """Where a model of a router writes: run.trace becomes run.MODEL.trace, for the models of a router share its options.
    Devices and FIFOs stay what they are. ``child``: the router's name for the model, None without a router."""
    if not child:
        return path
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            return path
    except OSError:
        pass
    place = Path(path)
    name = urllib.parse.quote(child, safe="")
    if len(name) > _CHILD_NAME_MAX:
        name = f"{name[:_CHILD_NAME_MAX]}-{hashlib.sha256(child.encode(errors='surrogateescape')).hexdigest()[:8]}"
    return str(place.with_name(f"{place.stem}.{name}{place.suffix}")) if place.name else path
