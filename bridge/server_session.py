"""What llama-server asks around each load of its model: open the pack, open the cache, close both.

The server calls from its own threads and waits for the answer; one model is loaded at a time.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from ..pypack.errors import ExpertPackError, UsageError
from ..pypack.format.layout import payload_bytes
from ..pypack.format.pack import Pack
from ..pypack.policy import DEFAULT_POLICY
from ..pypack.printable import printable
from ..pypack.stats.counters import ExpertStats
from ..pypack.stats.stats_file import StatsWriter
from ..pypack.values.checks import as_number, check_path, shown
from ..pypack.values.sizes import parse_size
from ._server import ffi, lib
from .model_pack import gpu_layers, open_checked, working_set
from .outputs import TraceFile, check_outputs, path_of_child
from .provider import Provider

_log = logging.getLogger(__name__)

_HALF_OF_FREE = (1 << 64) - 1  # UINT64_MAX
_KEYWORD = re.compile(
    r"(?<![\w./-])(expert_(?:cache_reserve|cache|direct_io|pack|policy|read_splits|stage_slots|stats_interval"
    r"|stats_path|trace|verify))(=\w+)?(?![\w/-]|\.\w)"
)
_FLAGS = {
    "expert_direct_io=False": "--no-expert-direct-io",
    "expert_pack=True": "--expert-pack auto",
    "expert_stats_path": "--expert-stats-file",
}


def run(arguments: list[bytes], executable: bytes) -> int:
    """llama-server's main: ``arguments`` with the program's name first; ``executable``: what a router starts."""
    strings = [ffi.new("char[]", argument) for argument in arguments]
    argv = ffi.new("char *[]", [*strings, ffi.NULL])
    path = ffi.new("char[]", executable)
    launcher = ffi.new("expert_launcher *")
    launcher.open, launcher.start = lib.expert_launcher_open, lib.expert_launcher_start
    launcher.close, launcher.why = lib.expert_launcher_close, lib.expert_launcher_why
    return int(lib.expert_server_main(len(strings), argv, path, launcher))


class _Session:
    """One loaded model with its pack."""

    def __init__(self, request: Any) -> None:
        model_path = _text(request.model_path)
        pack_path = _text(request.pack)
        trace_path = _output("expert_trace", request.trace, request)
        stats_path = _output("expert_stats_path", request.stats_file, request)
        interval_s = _seconds(_given(request.stats_interval, "10"))
        if stats_path is None and request.stats_interval != ffi.NULL:
            raise UsageError("expert_stats_interval would have no effect without expert_stats_path: give both or none")
        self.pack = open_checked(model_path, True if pack_path == "auto" else pack_path)
        _refuse_contradictions(request, self.pack)
        check_outputs(model_path, self.pack, {"expert_trace": trace_path, "expert_stats_path": stats_path})
        self.expert_bytes = payload_bytes(gpu_layers(self.pack, request.n_gpu_layers))
        self.options: dict[str, Any] = {
            "cache": _given(request.cache, "auto"),
            "policy": _given(request.policy, DEFAULT_POLICY),
            "verify": _given(request.verify, "first"),
            "direct_io": request.direct_io != 0,
        }
        pairs = (line.rpartition("=") for line in _text(request.kv_overrides).split("\n")[:-1])
        self.provider = Provider(
            self.pack,
            model_path,
            top_k=working_set(self.pack, {key: int(value) for key, _, value in pairs}),
            reserve=_given(request.cache_reserve, "1GiB"),
            read_splits=as_number(_given(request.read_splits, "64")),
            stage_slots=as_number(_given(request.stage_slots, "12")),
            trace=_the_trace(trace_path),
            **self.options,
        )
        self.stats_writer: StatsWriter | None = None
        if stats_path is not None:
            try:
                self.stats_writer = StatsWriter(stats_path, interval_s, self.stats)
            except BaseException:
                self.provider.close()
                raise

    def stats(self) -> ExpertStats:
        """What was counted since the server was started, not since it woke up."""
        now = self.provider.stats()
        return now if _counted_before is None else now.plus(_counted_before)

    def cache_max(self) -> int:
        """Bytes that the cache may take on a device; _HALF_OF_FREE where that is not a size."""
        cache = str(self.options["cache"]).strip().lower()
        return _HALF_OF_FREE if cache == "auto" or cache.endswith("%") else parse_size(cache, 0)

    def info(self) -> str:
        """For /props."""
        layers = self.pack.layers
        return json.dumps(
            {
                "path": printable(Path(self.pack.path).absolute()),
                "n_layers": len(layers),
                "n_experts": sum(layer.n_expert for layer in layers),
                "expert_bytes": payload_bytes(layers),
                "cache_bytes": self.provider.arena_bytes,
                "cache_slots": self.provider.cache.n_slots,
                **{name: value for name, value in self.options.items() if name != "cache"},
            }
        )

    def close(self) -> None:
        global _counted_before
        if self.stats_writer is not None:
            self.stats_writer.close()
        _counted_before = self.stats()
        self.provider.close()


_session: _Session | None = None
_counted_before: ExpertStats | None = None  # by sessions that are closed
_trace: TraceFile | None = None  # of all sessions; the end of the process closes it
_kept: dict[str, Any] = {}  # strings that C holds


def _refuse_contradictions(request: Any, pack: Pack) -> None:
    if not request.split_by_layer:
        raise UsageError(
            "an expert pack can't be used with --split-mode row or tensor: drop --split-mode, or drop --expert-pack"
        )
    names = [role.tensor for layer in pack.layers for role in layer.roles]
    for pattern in _text(request.overrides).splitlines():
        try:
            hit = next(filter(re.compile(pattern).search, names), None)
        except re.error:  # C++ may understand it
            hit = next((name for name in names if "exps" in pattern), None)
        if hit is not None:
            raise UsageError(
                f"--cpu-moe, --n-cpu-moe or --override-tensor places {hit}, which comes from the expert pack: drop "
                "that flag (where the cache lies follows from --gpu-layers), or drop --expert-pack"
            )


def _output(name: str, path: Any, request: Any) -> str | None:
    given = _given(path, None)
    return None if given is None else path_of_child(check_path(name, given), _given(request.child, None))


def _the_trace(path: str | None) -> TraceFile | None:
    global _trace
    if path is not None and _trace is None:
        _trace = TraceFile(path)
    return _trace


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"expert_stats_interval must be a number of seconds above 0, not {shown(text)}") from None


def with_flags(message: str) -> str:
    """The message with the server's flags in place of the keywords of ``Llama`` that it names."""

    def flag(match: re.Match[str]) -> str:
        keyword, value = match[1], match[2] or ""
        return _FLAGS.get(keyword + value) or _FLAGS.get(keyword, "--" + keyword.replace("_", "-")) + value

    return _KEYWORD.sub(flag, message)


# ---- what C calls


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator, unused-ignore]
def expert_launcher_open(request: Any, opened: Any) -> int:
    global _session
    session: _Session | None = None
    try:
        if _session is not None:
            raise UsageError("a model with an expert pack is open already: close that one first")
        session = _Session(request)
        opened.store = ffi.cast("void *", session.provider.address)
        opened.counters = ffi.from_buffer("int64_t[]", session.provider.counters.array)
        opened.cache_max, opened.expert_bytes = session.cache_max(), session.expert_bytes
    except Exception as error:
        opened.error = _sentence(error)
        if session is not None:
            session.close()  # C does not close what did not open
        return 0
    _session = session
    return 1


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator, unused-ignore]
def expert_launcher_start(opened: Any) -> int:
    assert _session is not None
    try:
        _session.provider.start()
        opened.cache_bytes = sum(_session.provider.arena_bytes.values())
        opened.n_slots = _session.provider.cache.n_slots
        opened.info = _keep("info", _session.info())
    except Exception as error:
        opened.error = _sentence(error)
        return 0
    return 1


@ffi.def_extern()  # type: ignore[untyped-decorator, unused-ignore]
def expert_launcher_close() -> None:
    _close()


@ffi.def_extern()  # type: ignore[untyped-decorator, unused-ignore]
def expert_launcher_why() -> Any:
    return _keep("why", with_flags(_session.provider.take_error()) if _session is not None else "")


def _close() -> None:
    global _session
    if _session is not None:
        _session.close()
        _session = None


def _sentence(error: Exception) -> Any:
    if not isinstance(error, ExpertPackError | OSError | ValueError):
        _log.error("the expert pack could not be opened", exc_info=error)
    return _keep("error", with_flags(str(error) or type(error).__name__))


def _keep(name: str, text: str) -> Any:
    """A C string that stays valid until the next one of this name."""
    _kept[name] = ffi.new("char[]", text.encode(errors="replace"))
    return _kept[name]


def _given(chars: Any, otherwise: Any) -> Any:
    """The flag's text, ``otherwise`` if it was not given."""
    return otherwise if chars == ffi.NULL else _text(chars)


def _text(chars: Any) -> str:
    return ffi.string(chars).decode(errors="surrogateescape")  # type: ignore[no-any-return]
