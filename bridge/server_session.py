"""What llama-server asks around each load of its model: open the pack, open the cache, close both.

The server calls from its own threads and waits for the answer; one model is loaded at a time.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from bridge._server import ffi, lib
from bridge.model_pack import open_checked, working_set
from bridge.outputs import TraceFile, check_outputs, path_of_child
from bridge.provider import Provider
from pypack.budget import parse_size
from pypack.counters import ExpertStats
from pypack.errors import ExpertPackError, UsageError
from pypack.layout import payload_bytes
from pypack.pack import Pack
from pypack.policy import DEFAULT_POLICY
from pypack.stats_file import StatsWriter

_log = logging.getLogger(__name__)


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
        self.pack = open_checked(model_path, True if pack_path == "auto" else pack_path)
        _refuse_contradictions(request, self.pack)
        trace_path, stats_path = _output(request, request.trace), _output(request, request.stats_file)
        check_outputs(model_path, self.pack, {"--expert-trace": trace_path, "--expert-stats-file": stats_path})
        self.options: dict[str, Any] = {
            "cache": _text(request.cache),
            "policy": DEFAULT_POLICY if request.policy == ffi.NULL else _text(request.policy),
            "verify": _text(request.verify),
            "direct_io": bool(request.direct_io),
        }
        architecture = self.pack.manifest.model.architecture
        self.provider = Provider(
            self.pack,
            model_path,
            top_k=working_set(
                self.pack, {f"{architecture}.expert_used_count": request.top_k} if request.top_k > 0 else None
            ),
            reserve=_text(request.cache_reserve),
            read_splits=request.read_splits,
            stage_slots=request.stage_slots,
            trace=_the_trace(trace_path),
            **self.options,
        )
        self.stats_writer: StatsWriter | None = None
        if stats_path is not None:
            try:
                self.stats_writer = StatsWriter(stats_path, _seconds(_text(request.stats_interval)), self.stats)
            except BaseException:
                self.provider.close()
                raise

    def stats(self) -> ExpertStats:
        """What was counted since the server was started, not since it woke up."""
        now = self.provider.stats()
        return now if _counted_before is None else now.plus(_counted_before)

    def fit_bytes(self) -> tuple[int, int]:
        """What memory fitting must leave for the cache on a device: at least and at best."""
        cache = self.options["cache"]
        if cache == "auto" or str(cache).endswith("%"):
            return 0, payload_bytes(self.pack.layers)
        n_bytes = parse_size(str(cache), 0)
        return n_bytes, n_bytes

    def info(self) -> str:
        """For /props."""
        layers = self.pack.layers
        return json.dumps(
            {
                "path": str(Path(self.pack.path).absolute()),
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


def _output(request: Any, path: Any) -> str | None:
    if path == ffi.NULL:
        return None
    return path_of_child(_text(path), None if request.child == ffi.NULL else _text(request.child))


def _the_trace(path: str | None) -> TraceFile | None:
    global _trace
    if path is not None and _trace is None:
        _trace = TraceFile(path)
    return _trace


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"the statistics interval must be a number of seconds above 0, not {text!r}") from None


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
        opened.fit_bytes_min, opened.fit_bytes_max = session.fit_bytes()
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
    return _keep("why", _session.provider.take_error() if _session is not None else "")


def _close() -> None:
    global _session
    if _session is not None:
        _session.close()
        _session = None


def _sentence(error: Exception) -> Any:
    if not isinstance(error, ExpertPackError | OSError | ValueError):
        _log.error("the expert pack could not be opened", exc_info=error)
    return _keep("error", str(error) or type(error).__name__)


def _keep(name: str, text: str) -> Any:
    """A C string that stays valid until the next one of this name."""
    _kept[name] = ffi.new("char[]", text.encode(errors="replace"))
    return _kept[name]


def _text(chars: Any) -> str:
    return ffi.string(chars).decode(errors="surrogateescape")  # type: ignore[no-any-return]
