"""What llama-server asks around each load of its model: open the pack, open the cache, close both.

The server calls from its own threads and waits for the answer; one model is loaded at a time.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..pypack.errors import ExpertPackError, UsageError
from ..pypack.format.layout import payload_bytes
from ..pypack.placement.budget import cache_room
from ..pypack.printable import printable
from ..pypack.stats.counters import ExpertStats
from ..pypack.stats.stats_file import StatsWriter
from ..pypack.values.flags import flag_help, flag_off, flag_variable, values_of_flags, with_flags
from ..pypack.values.options import OPTIONS, ExpertOptions, is_pack
from ._server import ffi, lib
from .batch_sizes import context_bytes
from .cpu_layers import layers_on_cpu
from .model_pack import gpu_layers, open_checked, working_set
from .outputs import TraceFile, check_outputs, path_of_child
from .provider import Provider

_log = logging.getLogger(__name__)


def run(arguments: list[bytes], executable: bytes) -> int:
    """llama-server's main: ``arguments`` with the program's name first; ``executable``: what a router starts."""
    strings = [ffi.new("char[]", argument) for argument in arguments]
    argv = ffi.new("char *[]", [*strings, ffi.NULL])
    path = ffi.new("char[]", executable)
    flags = _flags()
    launcher = ffi.new("expert_launcher *")
    launcher.flags, launcher.n_flags = flags, len(flags)
    for name in ("open_pack", "cache_room", "choose_batch", "open_arenas", "close_pack", "why_failed"):
        setattr(launcher, name, getattr(lib, f"expert_launcher_{name}"))
    return int(lib.expert_server_main(len(strings), argv, path, launcher))


def _flags() -> Any:
    """[n_flags] of ``expert_flag``."""
    flags = ffi.new("expert_flag[]", len(OPTIONS))
    for flag, option in zip(flags, OPTIONS.values(), strict=True):
        said = {"name": option.flag, "off": flag_off(option), "hint": option.hint}
        for name, text in {**said, "help": flag_help(option), "variable": flag_variable(option)}.items():
            setattr(flag, name, ffi.NULL if text is None else _keep(f"{option.flag} {name}", text))
    return flags


class _Session:
    """One loaded model with its pack."""

    def __init__(self, request: Any, given: dict[str, Any]) -> None:
        model_path = _text(request.model_path)
        self.options = _of_child(ExpertOptions.checked(given), _child(request))
        self.pack = open_checked(model_path, self.options.expert_pack)
        _refuse_contradictions(request)
        check_outputs(model_path, self.pack, self.options)
        lines = (line.rpartition("=") for line in _text(request.overrides).splitlines())
        on_cpu = layers_on_cpu(self.pack.layers, [(pattern, buffer) for pattern, _, buffer in lines])
        on_gpus = gpu_layers(self.pack, request.n_gpu_layers)
        self._fitted_bytes = payload_bytes([layer for layer in on_gpus if layer.index not in on_cpu])
        pairs = (line.rpartition("=") for line in _text(request.kv_overrides).split("\n")[:-1])
        top_k = working_set(self.pack, {key: int(value) for key, _, value in pairs})
        self.provider = Provider(
            self.pack, model_path, self.options, top_k=top_k, on_cpu=on_cpu, trace=_the_trace(self.options)
        )
        self.stats_writer: StatsWriter | None = None
        if self.options.expert_stats_path is not None:
            try:
                self.stats_writer = StatsWriter(
                    self.options.expert_stats_path, self.options.expert_stats_interval, self.stats
                )
            except BaseException:
                self.provider.close()
                raise

    def stats(self) -> ExpertStats:
        """What was counted since the server was started, not since it woke up."""
        now = self.provider.stats()
        return now if _counted_before is None else now.plus(_counted_before)

    def cache_room(self, free_bytes: int, share: float) -> int:
        """Bytes that fitting must leave on a device that gets this share of the layers."""
        return cache_room(self.options.expert_cache, int(share * self._fitted_bytes), free_bytes)

    def choose_batch(self, model: int, params: int, least: int, most: int) -> int:
        """Tokens of a physical batch for a context of the model with these parameters (addresses), from least to most."""
        provider = self.provider
        chosen = provider.plan_batch(most, lambda n: context_bytes(model, params, n)) if most > least else least
        provider.n_ubatch = max(least, chosen)
        return provider.n_ubatch

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
                "host_bytes": self.provider.host_bytes,
                "cache_slots": self.provider.cache.n_slots,
                "n_ubatch": self.provider.n_ubatch,
                "policy": self.options.expert_policy,
                "verify": self.options.expert_verify,
                "direct_io": self.options.expert_direct_io,
            }
        )

    def close(self) -> None:
        """After the model was freed, or was not loaded."""
        global _counted_before
        if self.stats_writer is not None:
            self.stats_writer.close()
        _counted_before = self.stats()
        self.provider.close()


_session: _Session | None = None
_counted_before: ExpertStats | None = None  # by sessions that are closed
_trace: TraceFile | None = None  # of all sessions; the end of the process closes it
_kept: dict[str, Any] = {}  # strings that C holds


def _no_effect(given: dict[str, Any], child: str | None) -> str | None:
    """A warning if flags were given that do nothing, for there is no pack. Raises UsageError if that can't be meant."""
    unused = [f"{name}=False" if value is False else name for name, value in given.items() if name != "expert_pack"]
    if not unused:
        return None
    why = f"{', '.join(unused)} would have no effect without an expert pack"
    if "expert_pack" not in given and child is None:  # a router passes its own flags on to all its models
        raise UsageError(
            f"{why}: add --expert-pack auto or the path of the pack, or leave out what has no effect "
            "(flags, LLAMA_ARG_EXPERT_* variables and config files count; --expert-pack none makes this a warning)"
        )
    return why


def _refuse_contradictions(request: Any) -> None:
    if not request.split_by_layer:
        raise UsageError(
            "an expert pack can't be used with --split-mode row or tensor: drop --split-mode, or drop --expert-pack"
        )


def _of_child(options: ExpertOptions, child: str | None) -> ExpertOptions:
    """The options with the files that this model of a router writes."""
    trace, stats = (
        path and path_of_child(os.fspath(path), child) for path in (options.expert_trace, options.expert_stats_path)
    )
    return replace(options, expert_trace=trace, expert_stats_path=stats)


def _the_trace(options: ExpertOptions) -> TraceFile | None:
    global _trace
    if options.expert_trace is not None and _trace is None:
        _trace = TraceFile(options.expert_trace)
    return _trace


# ---- what C calls


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator, unused-ignore]
def expert_launcher_open_pack(request: Any, opened: Any) -> int:
    global _session
    session: _Session | None = None
    try:
        settings = (request.settings[i] for i in range(request.n_settings))
        given = values_of_flags({_text(setting.name): _text(setting.value) for setting in settings})
        if not is_pack(given.get("expert_pack")):
            warning = _no_effect(given, _child(request))
            opened.message = ffi.NULL if warning is None else _keep("message", with_flags(warning))
            return 1
        if _session is not None:
            raise UsageError("a model with an expert pack is open already: close that one first")
        session = _Session(request, given)
        opened.store = ffi.cast("void *", session.provider.address)
        opened.counters = ffi.from_buffer("int64_t[]", session.provider.counters.array)
    except Exception as error:
        opened.message = _sentence(error)
        if session is not None:
            session.close()  # C does not close what did not open
        return 0
    _session = session
    return 1


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator, unused-ignore]
def expert_launcher_cache_room(free_bytes: int, share: float) -> int:
    return 0 if _session is None else _session.cache_room(free_bytes, share)


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator, unused-ignore]
def expert_launcher_choose_batch(model: Any, params: Any, least: int, most: int) -> int:
    assert _session is not None
    try:
        model, params = (int(ffi.cast("uintptr_t", pointer)) for pointer in (model, params))
        return _session.choose_batch(model, params, least, most)
    except Exception:  # open_arenas() will say what is wrong, if it is
        _log.exception("the size of batches could not be chosen")
        return least


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator, unused-ignore]
def expert_launcher_open_arenas(opened: Any) -> int:
    assert _session is not None
    try:
        _session.provider.open_arenas()
        opened.cache_bytes = sum(_session.provider.arena_bytes.values())
        opened.n_slots = _session.provider.cache.n_slots
        opened.info = _keep("info", _session.info())
        opened.message = _keep("message", _session.provider.summary())
    except Exception as error:
        opened.message = _sentence(error)
        return 0
    return 1


@ffi.def_extern()  # type: ignore[untyped-decorator, unused-ignore]
def expert_launcher_close_pack() -> None:
    global _session
    if _session is not None:
        _session.close()
        _session = None


@ffi.def_extern()  # type: ignore[untyped-decorator, unused-ignore]
def expert_launcher_why_failed() -> Any:
    return _keep("why", with_flags(_session.provider.take_error()) if _session is not None else "")


def _sentence(error: Exception) -> Any:
    if not isinstance(error, ExpertPackError | OSError | ValueError):
        _log.error("the expert pack could not be opened", exc_info=error)
    return _keep("message", with_flags(str(error) or type(error).__name__))


def _keep(name: str, text: str) -> Any:
    """A C string that stays valid until the next one of this name."""
    _kept[name] = ffi.new("char[]", text.encode(errors="replace"))
    return _kept[name]


def _child(request: Any) -> str | None:
    """The router's name for the model, None without a router."""
    return None if request.child == ffi.NULL else _text(request.child)


def _text(chars: Any) -> str:
    return ffi.string(chars).decode(errors="surrogateescape")  # type: ignore[no-any-return]
