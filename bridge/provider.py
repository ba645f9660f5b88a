"""The expert provider: answers native's callbacks with pypack's cache and reader.

native misses, takes next_slots (or --choose_slots--> cache) --> native reads the blocks --> commit
                                                   while it does: --prepare--> cache chooses the next slots
                                                 if it can't: --read--> reader --> commit or fail
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..pypack.drive.reader import Reader
from ..pypack.errors import BudgetError, ExpertPackError, NativeError, ReadError, UsageError
from ..pypack.format.layout import Layer, payload_bytes
from ..pypack.format.pack import Pack
from ..pypack.placement.batch import MOST_ON_CPU, Held, choose_batch, pass_bytes
from ..pypack.placement.budget import (
    PoolPlan,
    cache_budget,
    cpu_budget,
    host_budget,
    plan_pools,
    working_set_bytes,
)
from ..pypack.placement.cache import ExpertCache
from ..pypack.policy import make_policy
from ..pypack.printable import printable
from ..pypack.stats.counters import ExpertStats
from ..pypack.system.host_memory import host_memory_free
from ..pypack.system.os_errors import os_errors
from ..pypack.trace.format import encode_header
from ..pypack.values.options import ExpertOptions
from ..pypack.values.sizes import parse_size
from ._provider import ffi, lib
from .batch_sizes import DeviceBytes
from .callbacks import callbacks_of, last_error, text_of
from .library import build_info
from .native_tables import SharedCounters, describe_blocks, describe_layers, share_tables
from .outputs import TraceFile
from .switching import switch_often

_log = logging.getLogger(__name__)


class Provider:
    """Experts of one file's models, from one pack. Create it before the first model is loaded, close it after the last is freed.

    ``top_k``: experts that a token uses in a layer: the smallest cache. ``on_cpu``: indices of layers that are computed on the
    CPU in any case. ``trace``: gets every acquire, see docs/FORMAT.md; it
    is complete when the provider is closed, and closed by whoever made it. Raises :class:`ExpertPackError`.
    """

    def __init__(
        self,
        pack: Pack,
        model_path: str | os.PathLike[str],
        options: ExpertOptions,
        *,
        top_k: int,
        on_cpu: frozenset[int] = frozenset(),
        trace: TraceFile | None = None,
    ) -> None:
        self._pack = pack
        self._top_k = top_k
        self._on_cpu = on_cpu
        self._options = options
        self._reserve_bytes = parse_size(options.expert_cache_reserve, host_memory_free(), "expert_cache_reserve")
        self._errors: dict[int, ExpertPackError] = {}  # by thread: why its callback failed
        self.arena_bytes: dict[str, int] = {}  # by device
        self.host_bytes: dict[str, int] = {}  # that it reads in place
        self._plans: list[PoolPlan] = []
        self.n_ubatch = 0  # tokens of a batch at most, of all models
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

    def begin_load(self) -> None:
        """Another model of the file is to be loaded on this thread. Raises :class:`NativeError`."""
        if not lib.expert_store_begin_load(self._store):
            raise NativeError(last_error())

    def plan_batch(self, most: int, measure: Callable[[int], dict[str, DeviceBytes]]) -> int:
        """Tokens that prompts of the model that was loaded last are computed in at a time, ``most`` at most.

        ``measure``: what is free on each device, and what a context with batches of so many tokens takes of it. Before the context
        is made. Raises :class:`ExpertPackError`.
        """
        if not lib.expert_store_loaded(self._store):
            raise UsageError(last_error())
        layers: dict[str, list[Layer]] = {}
        for layer in self._pack.layers:
            device = lib.expert_store_device(self._store, layer.index)
            if device != ffi.NULL:
                layers.setdefault(text_of(device), []).append(layer)
        whole = sum(payload_bytes(of_device) for of_device in layers.values())
        most = min(most, MOST_ON_CPU) if "CPU" in layers else most
        return choose_batch(most, whole, lambda n: self._held(layers, measure(n), n))

    def _held(self, layers: dict[str, list[Layer]], found: dict[str, DeviceBytes], n_ubatch: int) -> Held | None:
        """What the experts have beside such a context; None if there is no room for it, or then none for them."""
        host_free = host_memory_free() - found["CPU"].taken if "CPU" in found else 0
        on_devices: list[int] = []
        everywhere = 0
        for device, of_device in layers.items():
            if device not in found:
                return None
            free = host_free if device == "CPU" else found[device].free - found[device].taken
            free -= self._pass_bytes(device, of_device, n_ubatch)
            budget = self._budget(of_device, device, free, host_free, beside_gpu=set(layers) != {"CPU"})
            here = min(budget.n_bytes, free - self._reserve_bytes)
            if device in self.arena_bytes:  # another model has opened it
                here = self.arena_bytes[device] if free >= self._reserve_bytes else -1
            if here < working_set_bytes(of_device, self._top_k):
                return None
            on_devices.append(here)
            everywhere += min(here + budget.host_bytes, payload_bytes(of_device))
        return Held(tuple(on_devices), everywhere)

    def _pass_bytes(self, device: str, layers: Sequence[Layer], n_ubatch: int) -> int:
        return 0 if device == "CPU" else pass_bytes(layers, self._top_k, n_ubatch)

    def open_arenas(self, has_weights: bool = True) -> None:
        """Ends the load, and opens the arenas of the model's devices that are not open yet.

        ``has_weights`` False: only the vocabulary was loaded. Raises :class:`ExpertPackError`.
        """
        if has_weights and lib.expert_store_n_claimed(self._store) == 0:
            raise NativeError(f"{self._pack.path}: the model uses none of the pack's weights")
        if not lib.expert_store_loaded(self._store):
            raise UsageError(last_error())
        if not lib.expert_store_open_arenas(self._store):
            raise self._errors.pop(threading.get_ident(), None) or NativeError(last_error())

    def end_load(self) -> None:
        """The load on this thread has failed. Nothing if none is under way."""
        if self._store != ffi.NULL:
            lib.expert_store_not_loaded(self._store)

    def reads(self, pack: Pack) -> bool:
        """Whether the experts come from the file of this pack, as it is now. Raises :class:`ReadError`."""
        with os_errors(pack.path):
            is_same_file = os.path.samestat(os.fstat(self._reader.fd), pack.path.stat())
        return is_same_file and pack.header == self._pack.header

    @property
    def address(self) -> int:
        """Of the native store."""
        return int(ffi.cast("uintptr_t", self._store))

    def stats(self) -> ExpertStats:
        """The counters now."""
        return self.counters.snapshot()

    def summary(self) -> str:
        """Where the experts have room, in one line, once the arenas are open."""
        pack, options = self._pack, self._options
        whole = f"{pack.n_keys} experts of {len(pack.layers)} layers, {_gib(pack.payload_bytes)}"
        places = ", ".join(text for plan in self._plans for text in _places(plan, pack.n_keys))
        how = "O_DIRECT" if options.expert_direct_io else "the page cache"
        batches = f"; prompts in batches of {self.n_ubatch} tokens" if self.n_ubatch else ""
        return (
            f"expert pack {printable(pack.path)}: {whole}; room for {places}{batches}; policy {options.expert_policy}; "
            f"read with {how}"
        )

    def take_error(self) -> str:
        """Why a computation on this thread has failed since this was last asked, one sentence; "" if none has."""
        error, why = self._errors.pop(threading.get_ident(), None), text_of(lib.expert_take_failure())
        return str(error) if error is not None else why

    @staticmethod
    def cancel(on: bool = True) -> None:
        """The computation on this thread fails at its next layer, and so do others after it, until it is called with False."""
        lib.expert_cancel(on)

    def close(self) -> None:
        """Wait for reads, unregister, free the arenas. Further calls do nothing."""
        if self._store == ffi.NULL:
            return
        self._reader.close()
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
        free_bytes -= self._pass_bytes(device, described, self.n_ubatch)
        plan = self._plan(described, host_memory_free() if device == "CPU" else free_bytes, device)
        self._add_arena(plan)
        self._add_host_slots(plan)
        self.cache.add_arena(plan)
        self._plans.append(plan)
        self.arena_bytes[device] = plan.arena_bytes
        self.host_bytes[device] = plan.host_bytes

    def may_take(self, n_bytes: int) -> bool:
        """Whether host memory has so many bytes left for slots. What was taken before is gone from it."""
        return host_memory_free() - n_bytes >= self._reserve_bytes

    def withdraw(self, slots: Sequence[int]) -> None:
        """These slots in host memory can't be had."""
        self.cache.withdraw(slots)
        _log.warning(
            "%d of the expert slots in host memory can't be had: it is short, or the system locks no more pages for a GPU; "
            "going on with those that are there (expert_ram was %s)",
            len(slots),
            self._options.expert_ram,
        )

    def _budget(
        self, layers: Sequence[Layer], device: str, free_bytes: int, host_free: int, *, beside_gpu: bool
    ) -> _Budget:
        """For a device that has ``free_bytes`` while the host has ``host_free``."""
        cache, ram, reserve_bytes = self._options.expert_cache, self._options.expert_ram, self._reserve_bytes
        host_bytes = host_budget(ram, layers, self._pack.layers, host_free, reserve_bytes)
        if device != "CPU":
            n_bytes = cache_budget(cache, layers, free_bytes, reserve_bytes, device)
            return _Budget(n_bytes, host_bytes, "expert_cache")
        n_bytes, option = cpu_budget(
            cache, ram, layers, host_bytes, self._top_k, free_bytes, reserve_bytes, beside_gpu=beside_gpu
        )
        return _Budget(n_bytes, 0, option)

    def _plan(self, layers: Sequence[Layer], free_bytes: int, device: str) -> PoolPlan:
        budget = self._budget(layers, device, free_bytes, host_memory_free(), beside_gpu=bool(self._plans))
        return plan_pools(
            layers,
            budget.n_bytes,
            self._top_k,
            device,
            free_bytes=free_bytes,
            reserve_bytes=self._reserve_bytes,
            host_bytes=budget.host_bytes,
            option=budget.option,
        )

    def _add_arena(self, plan: PoolPlan) -> None:
        slots, offsets = plan.arena_slots()
        slots += self.cache.n_slots
        pinned = ffi.new("int *")
        if not lib.expert_store_add_arena(
            self._store,
            plan.device.encode(),
            plan.arena_bytes,
            ffi.from_buffer("int32_t[]", slots),
            ffi.from_buffer("uint64_t[]", offsets),
            len(slots),
            pinned,
        ):
            raise BudgetError(last_error())
        if not pinned[0]:
            _log.warning("the memory that reads for %s land in is not page-locked: copies will be slower", plan.device)

    def _add_host_slots(self, plan: PoolPlan) -> None:
        for index, pool in enumerate(plan.pools):
            first = self.cache.n_slots + pool.first_slot + pool.n_slots - pool.n_host
            spares, transits = plan.beside_slots(pool)
            if pool.n_host and not lib.expert_store_add_host_slots(
                self._store,
                plan.device.encode(),
                self.cache.n_pools + index,
                first,
                pool.n_host,
                pool.block_bytes,
                ffi.from_buffer("uint64_t[]", spares),
                len(spares),
                ffi.from_buffer("uint64_t[]", transits),
                len(transits),
            ):
                raise BudgetError(last_error())

    def host_memory(self, layer: int, slot: int) -> memoryview | None:
        """The bytes of a slot of the layer's, None if they lie on a device. Slots may move between graphs."""
        address = lib.expert_store_host_slot(self._store, slot)
        n_bytes = self._pack.layers[layer].block_bytes
        return None if address == ffi.NULL else memoryview(ffi.buffer(address, n_bytes))

    def keep(self, error: Exception) -> None:
        """Remember why a callback failed."""
        if not isinstance(error, ExpertPackError):
            _log.error("the expert provider failed", exc_info=error)
            error = NativeError(f"the expert provider failed: {type(error).__name__}: {error}")
        self._errors[threading.get_ident()] = error

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
            dest = self.host_memory(layer, slot)
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
        return lib.expert_store_create(
            os.fsencode(model_path), describe_layers(layers, self._on_cpu), len(layers), tables, callbacks
        )


class _Budget(NamedTuple):
    """Bytes for a device's experts, there and in host memory beside it, and the option that the first follows from."""

    n_bytes: int
    host_bytes: int
    option: str


def _places(plan: PoolPlan, n_experts: int) -> Iterator[str]:
    n_host = sum(pool.n_host for pool in plan.pools)
    n_device = plan.n_slots - n_host
    yield f"{n_device} ({100 * n_device // n_experts} %) in {_gib(plan.arena_bytes)} on {plan.device}"
    if n_host:
        yield f"{n_host} ({100 * n_host // n_experts} %) in {_gib(plan.host_bytes)} of host memory beside it"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
