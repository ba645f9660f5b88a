"""The expert provider: answers native's callbacks with pypack's cache and reader.

native misses, takes next_slots (or --choose_slots--> cache) --> native reads the blocks --> commit
                                                   while it does: --prepare--> cache chooses the next slots
                                                 if it can't: --read--> reader --> commit or fail
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from ..pypack.drive.reader import Reader
from ..pypack.errors import BudgetError, ExpertPackError, NativeError, ReadError
from ..pypack.format.layout import Layer
from ..pypack.format.pack import Pack
from ..pypack.placement.budget import PoolPlan, cache_budget, plan_pools
from ..pypack.placement.cache import ExpertCache
from ..pypack.policy import make_policy
from ..pypack.stats.counters import Counter, ExpertStats
from ..pypack.system.host_memory import host_memory_free
from ..pypack.trace.format import encode_header
from ..pypack.values.options import ExpertOptions
from ..pypack.values.sizes import parse_size
from ._provider import ffi, lib
from .callbacks import callbacks_of, last_error, text_of
from .library import build_info
from .native_tables import SharedCounters, describe_blocks, describe_layers, share_tables
from .outputs import TraceFile
from .switching import switch_often

_log = logging.getLogger(__name__)


class Provider:
    """Experts of one model, from one pack. Create it before the model is loaded, close it after the model is freed.

    ``top_k``: experts that a token uses in a layer: the smallest cache. ``trace``: gets every acquire, see docs/FORMAT.md; it
    is complete when the provider is closed, and closed by whoever made it. Raises :class:`ExpertPackError`.
    """

    def __init__(
        self,
        pack: Pack,
        model_path: str | os.PathLike[str],
        options: ExpertOptions,
        *,
        top_k: int,
        trace: TraceFile | None = None,
    ) -> None:
        self._pack = pack
        self._top_k = top_k
        self._options = options
        self._reserve_bytes = parse_size(options.expert_cache_reserve, host_memory_free(), "expert_cache_reserve")
        self._slots: list[memoryview | None] = []  # [n_slots] host memory, None: a device's
        self._error: ExpertPackError | None = None
        self.arena_bytes: dict[str, int] = {}  # by device
        self.counters = SharedCounters()
        self.cache = ExpertCache(pack.layers, make_policy(options.expert_policy), self.counters)
        self._check_budget()
        self._store = ffi.NULL
        self._reader = Reader(pack, direct_io=options.expert_direct_io, counters=self.counters)
        try:
            self.blocks = describe_blocks(pack, self._reader.fd, options.expert_verify)
            self._handle = ffi.new_handle(self)
            self._store = self._register(os.fspath(model_path))
            if self._store == ffi.NULL:
                raise NativeError(last_error())
            switch_often(True)
            if trace is not None:
                header = encode_header(pack.layers, top_k, options.expert_policy)
                lib.expert_store_trace(self._store, trace.begin(header))
        except BaseException:
            self._reader.close()
            self.close()
            raise

    def open_arenas(self, has_weights: bool = True) -> None:
        """Open the arenas of the loaded model's devices; no other model may take these experts from now on.

        ``has_weights`` False: only the vocabulary was loaded. Raises :class:`ExpertPackError`.
        """
        if has_weights and lib.expert_store_n_claimed(self._store) == 0:
            raise NativeError(f"{self._pack.path}: the model uses none of the pack's weights")
        if not lib.expert_store_open_arenas(self._store):
            raise self._error or NativeError(last_error())

    @property
    def address(self) -> int:
        """Of the native store."""
        return int(ffi.cast("uintptr_t", self._store))

    def stats(self) -> ExpertStats:
        """The counters now."""
        return self.counters.snapshot()

    def n_failures(self) -> int:
        """How many computations have failed."""
        return int(self.counters.array[Counter.FAILURES])

    def take_error(self) -> str:
        """Why the last decode failed, one sentence."""
        error, self._error = self._error, None
        if error is not None:
            return str(error)
        return text_of(lib.expert_store_error(self._store)) if self._store != ffi.NULL else ""

    def close(self) -> None:
        """Wait for reads, unregister, free the arenas. Further calls do nothing."""
        if self._store == ffi.NULL:
            return
        self._reader.close()
        self._slots.clear()
        if not lib.expert_store_trace(self._store, ffi.NULL):
            _log.warning("%s", last_error())  # llama.cpp's log, where it was said first, may be off
        lib.expert_store_free(self._store)
        self._store = ffi.NULL
        switch_often(False)

    def forget(self) -> None:
        """In a forked child, instead of close(): the store and the reads are the parent's."""
        self._reader.close()
        self._store = ffi.NULL

    # ---- callbacks, on any thread; those of the cache are its own

    def open_arena(self, device: str, free_bytes: int, layers: Sequence[int]) -> None:
        """Size the arena of a device, by its ggml name, for ``layers`` (indices) and give it to native.

        ``free_bytes``: what native knows of the device. Raises :class:`ExpertPackError`.
        """
        described = [self._pack.layers[index] for index in layers]
        plan = self._plan(described, host_memory_free() if device == "CPU" else free_bytes, device)
        self._slots += self._add_arena(plan)
        self.cache.add_arena(plan)
        self.arena_bytes[device] = plan.arena_bytes

    def _plan(self, layers: Sequence[Layer], free_bytes: int, device: str) -> PoolPlan:
        reserve_bytes = self._reserve_bytes
        budget_bytes = cache_budget(self._options.expert_cache, layers, free_bytes, reserve_bytes, device)
        return plan_pools(layers, budget_bytes, self._top_k, device, free_bytes=free_bytes, reserve_bytes=reserve_bytes)

    def _add_arena(self, plan: PoolPlan) -> Sequence[memoryview | None]:
        """[plan.n_slots] where the blocks of the new slots are read to."""
        offsets = plan.offsets()
        host, pinned = ffi.new("void **"), ffi.new("int *")
        if not lib.expert_store_add_arena(
            self._store,
            plan.device.encode(),
            plan.arena_bytes,
            self.cache.n_slots,
            plan.n_slots,
            ffi.from_buffer("uint64_t[]", offsets),
            host,
            pinned,
        ):
            raise BudgetError(last_error())
        if not pinned[0]:
            _log.warning("the memory that reads for %s land in is not page-locked: copies will be slower", plan.device)
        if host[0] == ffi.NULL:
            return [None] * plan.n_slots
        arena = memoryview(ffi.buffer(host[0], plan.arena_bytes))
        sizes = [pool.block_bytes for pool in plan.pools for _ in range(pool.n_slots)]
        return [arena[o : o + n] for o, n in zip(offsets.tolist(), sizes, strict=True)]

    def keep(self, error: Exception) -> None:
        """Remember why a callback failed."""
        if not isinstance(error, ExpertPackError):
            _log.error("the expert provider failed", exc_info=error)
            error = NativeError(f"the expert provider failed: {type(error).__name__}: {error}")
        self._error = error

    def read(self, layer: int, expert: int, slot: int) -> None:
        """Start a read that native can't do, or that failed there; whatever happens, native hears of it."""

        def deliver(block: memoryview) -> None:
            if not lib.expert_store_fill(self._store, slot, ffi.from_buffer(block), len(block)):
                raise ReadError(f"expert {expert} of layer {layer} could not be copied to the device")

        def done(error: Exception | None) -> None:
            try:
                if error is None:
                    lib.expert_store_commit(self._store, layer, expert, slot)
                    return
                self.cache.rollback(slot)
            except Exception as cause:  # a computation waits for this read: it must hear of it
                _log.exception("the read of expert %d of layer %d could not be booked", expert, layer)
                error = cause
            lib.expert_store_fail(self._store, layer, expert, str(error).encode())

        try:
            dest = self._slots[slot]
            self._reader.submit(layer, expert, deliver if dest is None else dest, done)
        except Exception as error:
            done(ReadError(f"{self._pack.path}: the read of expert {expert} of layer {layer} could not start: {error}"))

    # ---- registration

    def _check_budget(self) -> None:
        """A budget that can never do is refused before the model is loaded, which takes long.

        With a GPU only open_arena knows what is left for experts.
        """
        if not build_info()["cuda"]:
            self._plan(self._pack.layers, host_memory_free(), "CPU")

    def _register(self, model_path: str) -> Any:
        """The native store; NULL: :func:`last_error` says why."""
        layers = self._pack.layers
        tables = share_tables(self.cache, self.counters, self.blocks)
        tables.n_reads, tables.n_parts = self._options.expert_stage_slots, self._options.expert_read_splits
        tables.is_direct, tables.recheck = self._options.expert_direct_io, self._options.expert_verify != "off"
        callbacks = callbacks_of(self._handle)
        return lib.expert_store_create(os.fsencode(model_path), describe_layers(layers), len(layers), tables, callbacks)
