"""The packs that are open in this process: all models of a file share one. The first makes it, the last closes it.

One model of a file is loaded at a time, for the first says where experts lie; who comes meanwhile waits. A pack that is being
closed counts as one that loads, so that the file can be opened anew when nothing of it is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..pypack.errors import UsageError
from ..pypack.format.pack import Pack
from ..pypack.stats.stats_file import StatsWriter
from ..pypack.system.os_errors import os_errors
from ..pypack.values.options import ExpertOptions
from . import garbage, interrupts
from .outputs import TraceFile
from .provider import Provider

_log = logging.getLogger(__name__)

_File = tuple[int, int]  # device and inode
_lock = threading.Lock()  # guards the next one, and users and turn of its packs
_packs: dict[_File, SharedPack] = {}


class SharedPack:
    """What the models of a file share: the provider with its slots, and the files that their options name."""

    def __init__(self) -> None:
        self.users: set[int] = set()  # ids of the models: they are alive until they leave()
        self.turn: tuple[int, int] | None = None  # model and thread that load, or close; None: anyone may
        self.provider: Provider | None = None
        self._pack: Pack | None = None
        self._options = ExpertOptions()
        self._given: dict[str, Any] = {}  # what the options meant when they were given
        self._on_cpu: frozenset[int] = frozenset()  # layers
        self._top_k = 0  # of the first model
        self._trace: TraceFile | None = None
        self._stats_writer: StatsWriter | None = None

    def begin_load(
        self, pack: Pack, model_path: str, options: ExpertOptions, top_k: int, on_cpu: frozenset[int]
    ) -> None:
        """With the turn. Raises :class:`ExpertPackError`."""
        if self.provider is not None:
            self._refuse_differences(pack, model_path, options, on_cpu)
            if top_k > self._top_k:
                raise UsageError(
                    f"{model_path} is open already, with {self._top_k} experts a token, and can't be opened with {top_k} beside it, "
                    "for which its cache may be too small: open this one first, or close the other one"
                )
            self.provider.begin_load()
            return
        self._pack, self._options, self._given, self._on_cpu = pack, options, options.meanings(), on_cpu
        self._top_k = top_k
        self._trace = TraceFile(options.expert_trace) if options.expert_trace is not None else None
        self.provider = Provider(pack, model_path, options, top_k=top_k, on_cpu=on_cpu, trace=self._trace)

    def loaded(self, has_weights: bool) -> None:
        """The model whose turn it is can compute. Raises :class:`ExpertPackError`."""
        assert self.provider is not None
        self.provider.open_arenas(has_weights)
        if self._options.expert_stats_path is not None and self._stats_writer is None:
            self._stats_writer = StatsWriter(
                self._options.expert_stats_path, self._options.expert_stats_interval, self.provider.stats
            )
        self.turn = None

    def close(self) -> None:
        """After the last model is freed. Further calls do nothing."""
        for part in (self._stats_writer, self.provider, self._trace):
            if part is not None:
                part.close()

    def forget(self) -> None:
        """In a forked child, instead of close()."""
        if self.provider is not None:
            self.provider.forget()
        for output in (self._stats_writer, self._trace):
            if output is not None:
                output.close()

    def _refuse_differences(self, pack: Pack, model_path: str, options: ExpertOptions, on_cpu: frozenset[int]) -> None:
        assert self._pack is not None and self.provider is not None
        if not self.provider.reads(pack):
            here, there = (repr(str(path)) for path in (self._pack.path, pack.path))
            what = f"{here}, not {there}" if here != there else f"{here}, which has been replaced since"
            raise UsageError(
                f"{model_path} is open already, with the pack {what}: models of one file share its pack, so close the "
                "other one first, or give the same pack"
            )
        given = options.meanings()
        names = [name for name in given if name != "expert_pack" and given[name] != self._given[name]]
        if names:
            here, there = (
                " and ".join(f"{name}={getattr(values, name)!r}" for name in names)
                for values in (self._options, options)
            )
            raise UsageError(
                f"{model_path} is open already, with {here}, and can't be opened with {there} beside it: models of one "
                "file share their experts, so give the same expert options, or close the other one first"
            )
        if on_cpu != self._on_cpu:
            raise UsageError(
                f"{model_path} is open already, with the experts of {len(self._on_cpu)} layers on the CPU, and can't be opened "
                f"with those of {len(on_cpu)} there: give the same n_cpu_moe, or close the other one first"
            )


def enter(
    model: object,
    pack: Pack,
    model_path: str,
    options: ExpertOptions,
    *,
    top_k: int,
    on_cpu: frozenset[int] = frozenset(),
) -> SharedPack:
    """The model is about to be loaded on this thread. Waits while another one of the file is; if it fails, or the load
    does, the model must leave(). Raises :class:`ExpertPackError`."""
    with os_errors(Path(model_path)):
        found = Path(model_path).stat()
    while (shared := _take_turn((found.st_dev, found.st_ino), model)) is None:
        time.sleep(0.01)  # waiting for a lock, garbage that is collected here could need it
    shared.begin_load(pack, model_path, options, top_k, on_cpu)
    return shared


def leave(model: object) -> None:
    """The model is freed, or was not loaded. Nothing if it never entered, or has left."""
    for file, shared in list(_packs.items()):
        if id(model) in shared.users:
            _leave(model, file, shared)


def _take_turn(file: _File, model: object) -> SharedPack | None:
    """None if it is another model's turn. Raises UsageError if that would wait for this one."""
    with _undisturbed():
        shared = _packs.setdefault(file, SharedPack())
        if shared.turn is None:
            shared.turn = id(model), threading.get_ident()
            shared.users.add(id(model))
            return shared
        if shared.turn[1] == threading.get_ident():
            raise UsageError(
                "another model of this file is still being loaded or closed on this thread: close it first"
            )
    return None


def _leave(model: object, file: _File, shared: SharedPack) -> None:
    loads = shared.turn is not None and shared.turn[0] == id(model)
    if loads and shared.provider is not None:
        shared.provider.end_load()
    with _undisturbed():
        is_last = shared.users == {id(model)}
        if is_last:
            shared.turn = id(model), threading.get_ident()
        else:
            shared.users.discard(id(model))
            shared.turn = None if loads else shared.turn
    if is_last:
        shared.close()  # if that is interrupted, it is still this model's turn, and another close() goes on
        with _undisturbed():
            _packs.pop(file, None)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """The lock, where no signal handler and no garbage may come in between: they could close a model, which takes it."""
    with interrupts.held_back(), garbage.held_back(), _lock:
        yield


def _forget() -> None:
    """In a forked child: all that is open is the parent's."""
    global _lock
    _lock = threading.Lock()
    for shared in _packs.values():
        try:
            shared.forget()
        except Exception:  # the others must be forgotten all the same
            _log.exception("a pack of the parent could not be let go of completely")
    _packs.clear()


os.register_at_fork(after_in_child=_forget)
