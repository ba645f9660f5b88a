"""The expert provider: answers native's callbacks with pypack's cache and reader.

native misses, takes next_slots (or --choose_slots--> cache) --> native reads the blocks --> commit
                                                   while it does: --prepare--> cache chooses the next slots
                                                 if it can't: --read--> reader --> commit or fail
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bridge._provider import ffi, lib
from bridge.library import build_info
from pypack.budget import cache_budget, parse_size, plan_pools
from pypack.cache import N_NEXT, ExpertCache
from pypack.counters import Counter, Counters, ExpertStats
from pypack.direct_io import aligned_buffer
from pypack.errors import BudgetError, ExpertPackError, NativeError, ReadError, UsageError
from pypack.host_memory import host_memory_free
from pypack.policy import make_policy
from pypack.reader import READ_SPLITS_MAX, STAGE_SLOTS_MAX, Reader, check_verify
from pypack.staging import StagingPool
from pypack.trace_format import encode_header
from pypack.user_values import check_count, shown

if TYPE_CHECKING:
    from bridge.outputs import TraceFile
    from pypack.pack import Pack
    from pypack.reader import Verify

_log = logging.getLogger(__name__)

_CHECKS: dict[Verify, int] = {"off": 0, "first": 1, "every": 2}  # expert_block.check
_OWN_READS = 2  # at the same time: there are few, and a GPU needs a buffer for each

assert lib.EXPERT_NEXT_SLOTS == N_NEXT

_BLOCK = np.dtype([("offset", "<i8"), ("fd", "<i4"), ("check", "<i4"), ("digest", "u1", (16,))])  # expert_block


assert _BLOCK.itemsize == ffi.sizeof("expert_block")
assert all(at == ffi.offsetof("expert_block", name) for name, (_, at, *_) in (_BLOCK.fields or {}).items())


class Provider:
    """Experts of one model, from one pack. Create it before the model is loaded, close it after the model is freed.

    ``top_k``: experts that a token uses in a layer: the smallest cache. ``cache``: bytes, ``"20GiB"``, ``"60%"``
    or ``"auto"``, see :func:`pypack.budget.cache_budget`; ``reserve``: memory to leave free. ``trace``: gets
    every acquire, see docs/FORMAT.md; it is complete when the provider is closed, and closed by whoever made it.
    Raises :class:`ExpertPackError`.
    """

    def __init__(
        self,
        pack: Pack,
        model_path: str | os.PathLike[str],
        *,
        top_k: int,
        cache: str | int | float,
        reserve: str | int | float,
        direct_io: bool,
        read_splits: int,
        stage_slots: int,
        verify: Verify,
        policy: str,
        trace: TraceFile | None = None,
    ) -> None:
        self._pack = pack
        self._top_k = top_k
        self._budget = cache
        self._reserve_bytes = parse_size(reserve, host_memory_free(), "expert_cache_reserve")
        self._stage_slots = check_count("expert_stage_slots", stage_slots, 1, STAGE_SLOTS_MAX)
        self._n_parts = check_count("expert_read_splits", read_splits, 1, READ_SPLITS_MAX)
        check_verify("expert_verify", verify)
        if direct_io not in (True, False):
            raise UsageError(f"expert_direct_io must be True or False, not {shown(direct_io)}")
        self._slots: list[memoryview | StagingPool] = []  # [n_slots] host memory, or how to get there
        self._error: ExpertPackError | None = None
        self.arena_bytes: dict[str, int] = {}  # by device
        self.counters = _SharedCounters()
        self.cache = ExpertCache(pack.layers, make_policy(policy), self.counters)
        self._check_budget()
        self._is_direct = bool(direct_io)
        self._store = ffi.NULL
        self._reader = Reader(
            pack,
            direct_io=self._is_direct,
            read_splits=1,  # as many threads: native does the reading that must be fast
            stage_slots=_OWN_READS,
            verify="every",  # it reads what native could not, or has doubts about
            counters=self.counters,
        )
        self._recheck = verify != "off"
        try:
            self.blocks = _describe_blocks(pack, self._reader.fds, _CHECKS[verify])
            self._handle = ffi.new_handle(self)
            self._store = self._register(os.fspath(model_path))
            if self._store == ffi.NULL:
                raise NativeError(_last_error())
            _switch_often(True)
            if trace is not None:
                header = encode_header(pack.layers, top_k, policy)
                lib.expert_store_trace(self._store, trace.begin(header))
        except BaseException:
            self._reader.close()
            self.close()
            raise

    def start(self, has_weights: bool = True) -> None:
        """Open the arenas of the loaded model's devices; no other model may take these experts from now on.

        Raises :class:`ExpertPackError`.
        """
        if has_weights and lib.expert_store_n_claimed(self._store) == 0:
            raise NativeError(f"{self._pack.path}: the model uses none of the pack's weights")
        if not lib.expert_store_open_arenas(self._store):
            raise self._error or NativeError(_last_error())

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
        return _text(lib.expert_store_error(self._store)) if self._store != ffi.NULL else ""

    def close(self) -> None:
        """Wait for reads, unregister, free the arenas. Further calls do nothing."""
        if self._store == ffi.NULL:
            return
        self._reader.close()
        self._slots.clear()
        if not lib.expert_store_trace(self._store, ffi.NULL):
            _log.warning("%s", _last_error())  # llama.cpp's log, where it was said first, may be off
        lib.expert_store_free(self._store)
        self._store = ffi.NULL
        _switch_often(False)

    def forget(self) -> None:
        """In a forked child, instead of close(): the store and the reads are the parent's."""
        self._reader.close()
        self._store = ffi.NULL

    # ---- callbacks: on any thread

    def open_arena(self, device: str, free_bytes: int, layers: Sequence[int]) -> None:
        described = [self._pack.layers[index] for index in layers]
        is_host = device == "CPU"
        if is_host:
            free_bytes = host_memory_free()
        plan = plan_pools(
            described,
            cache_budget(self._budget, described, free_bytes, self._reserve_bytes, auto_share=0.5 if is_host else 1.0),
            self._top_k,
            device,
            free_bytes=free_bytes,
            reserve_bytes=self._reserve_bytes,
        )
        offsets = plan.offsets()
        host, pinned = ffi.new("void **"), ffi.new("int *")
        if not lib.expert_store_add_arena(
            self._store,
            device.encode(),
            plan.arena_bytes,
            self.cache.n_slots,
            plan.n_slots,
            ffi.from_buffer("uint64_t[]", offsets),
            host,
            pinned,
        ):
            raise BudgetError(_last_error())
        if host[0] == ffi.NULL:
            self._slots += [self._staging_pool()] * plan.n_slots
        else:
            arena = memoryview(ffi.buffer(host[0], plan.arena_bytes))
            sizes = [pool.block_bytes for pool in plan.pools for _ in range(pool.n_slots)]
            self._slots += [arena[o : o + n] for o, n in zip(offsets.tolist(), sizes, strict=True)]
        if not pinned[0]:
            _log.warning("the memory that reads for %s land in is not page-locked: copies will be slower", device)
        self.cache.add_arena(plan)
        self.arena_bytes[device] = plan.arena_bytes

    def _staging_pool(self) -> StagingPool:
        block_bytes = max(layer.block_bytes for layer in self._pack.layers)
        return StagingPool(self._reader, self._pack.layers, [aligned_buffer(block_bytes) for _ in range(_OWN_READS)])

    def choose_slots(self, layer: int, missing: list[int], active: list[int]) -> list[int]:
        return self.cache.choose_slots(layer, missing, active)

    def prepare(self, layer: int, fetched: list[int]) -> None:
        self.cache.prepare(layer, fetched)

    def keep(self, error: ExpertPackError) -> None:
        """Remember why a callback failed."""
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
            if isinstance(dest, StagingPool):
                dest.submit(layer, expert, deliver, done)
            else:
                self._reader.submit(layer, expert, dest, done)
        except Exception as error:
            done(ReadError(f"{self._pack.path}: the read of expert {expert} of layer {layer} could not start: {error}"))

    # ---- registration

    def _check_budget(self) -> None:
        """A budget that can never do is refused before the model is loaded, which takes long.

        With a GPU only open_arena knows what is left for experts.
        """
        layers, free_bytes = self._pack.layers, host_memory_free()
        budget = cache_budget(self._budget, layers, free_bytes, self._reserve_bytes)
        if build_info()["cuda"]:
            return
        plan_pools(layers, budget, self._top_k, free_bytes=free_bytes, reserve_bytes=self._reserve_bytes)

    def _register(self, model_path: str) -> Any:
        layers = ffi.new("expert_layer[]", len(self._pack.layers))
        for described, layer in zip(layers, self._pack.layers, strict=True):
            described.n_expert, described.first_key = layer.n_expert, layer.first_key
            described.block_bytes, described.n_roles = layer.block_bytes, len(layer.roles)
            for target, role in zip(described.roles, layer.roles, strict=False):
                target.tensor, target.type = role.tensor.encode(), role.type
                target.ne[0:3] = list(role.ne)
                target.bytes, target.offset = role.bytes, role.offset
        tables = ffi.new("expert_tables *")
        tables.slot_of = ffi.from_buffer("int32_t[]", self.cache.slot_of)
        tables.freq = ffi.from_buffer("int64_t[]", self.cache.freq)
        tables.last_use = ffi.from_buffer("int64_t[]", self.cache.last_use)
        tables.counters = ffi.from_buffer("int64_t[]", self.counters.array)
        tables.reserved_slot = ffi.from_buffer("int32_t[]", self.cache.reserved_slot)
        tables.owner = ffi.from_buffer("int64_t[]", self.cache.owner)
        tables.layer_slots = ffi.from_buffer("int32_t[]", self.cache.layer_slots)
        tables.layer_pool = ffi.from_buffer("int32_t[]", self.cache.layer_pool)
        tables.next_slots = ffi.from_buffer("int32_t[]", self.cache.next_slots)
        tables.blocks = ffi.from_buffer("expert_block[]", self.blocks)
        tables.n_reads, tables.n_parts, tables.is_direct = self._stage_slots, self._n_parts, self._is_direct
        tables.recheck = self._recheck
        callbacks = ffi.new("expert_provider *")
        callbacks.abi_version, callbacks.struct_size = lib.EXPERT_ABI_VERSION, ffi.sizeof("expert_provider")
        callbacks.user = self._handle
        callbacks.open_arena, callbacks.choose_slots = lib.expert_pack_open_arena, lib.expert_pack_choose_slots
        callbacks.prepare, callbacks.read = lib.expert_pack_prepare, lib.expert_pack_read
        return lib.expert_store_create(os.fsencode(model_path), layers, len(self._pack.layers), tables, callbacks)


def _describe_blocks(pack: Pack, fds: Sequence[int], check: int) -> NDArray[np.void]:
    """[n_keys] of ``expert_block``."""
    blocks = np.zeros(pack.n_keys, _BLOCK)
    blocks["fd"] = np.array(fds, np.int32)[pack.index["file_id"]]
    for name in ("offset", "digest"):
        blocks[name] = pack.index[name]
    blocks["check"] = check
    return blocks


class _SharedCounters(Counters):
    """Counters that native adds to as well."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = ffi.from_buffer("int64_t[]", self.array)

    def add(self, counter: Counter, n: int = 1) -> None:
        lib.expert_count(self._numbers + int(counter), n)


# ---- what C calls


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator, unused-ignore]
def expert_pack_open_arena(user: Any, device: Any, free_bytes: int, layers: Any, n_layers: int) -> int:
    provider: Provider = ffi.from_handle(user)
    try:
        provider.open_arena(_text(device), free_bytes, ffi.unpack(layers, n_layers))
    except Exception as error:
        provider.keep(error if isinstance(error, ExpertPackError) else _unexpected(error))
        return 0
    return 1


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator, unused-ignore]
def expert_pack_choose_slots(
    user: Any, layer: int, missing: Any, n_missing: int, active: Any, n_active: int, slots: Any
) -> int:
    provider: Provider = ffi.from_handle(user)
    try:
        taken = provider.choose_slots(layer, ffi.unpack(missing, n_missing), ffi.unpack(active, n_active))
    except Exception as error:
        provider.keep(error if isinstance(error, ExpertPackError) else _unexpected(error))
        return 0
    slots[0:n_missing] = taken
    return 1


@ffi.def_extern()  # type: ignore[untyped-decorator, unused-ignore]
def expert_pack_prepare(user: Any, layer: int, fetched: Any, n_fetched: int) -> None:
    provider: Provider = ffi.from_handle(user)
    try:
        provider.prepare(layer, ffi.unpack(fetched, n_fetched))
    except Exception:  # the next fetch asks
        _log.exception("the next slots could not be chosen")


@ffi.def_extern()  # type: ignore[untyped-decorator, unused-ignore]
def expert_pack_read(user: Any, layer: int, expert: int, slot: int) -> None:
    provider: Provider = ffi.from_handle(user)
    provider.read(layer, expert, slot)


def _unexpected(error: Exception) -> NativeError:
    _log.error("the expert provider failed", exc_info=error)
    return NativeError(f"the expert provider failed: {type(error).__name__}: {error}")


def _text(chars: Any) -> str:
    return ffi.string(chars).decode(errors="replace")  # type: ignore[no-any-return]


def _last_error() -> str:
    return _text(lib.expert_last_error())


# ---- thread switching

_switch_lock = threading.Lock()
_n_providers = 0
_usual_interval_s = 0.0


def _switch_often(on: bool) -> None:
    """While a provider runs, threads that compute in Python give way to callbacks after 0.1 ms instead of 5."""
    global _n_providers, _usual_interval_s
    with _switch_lock:
        if on and _n_providers == 0:
            _usual_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual_interval_s, 1e-4))
        _n_providers += 1 if on else -1
        if _n_providers == 0:
            sys.setswitchinterval(_usual_interval_s)


def _forget_providers() -> None:
    """In a forked child: those of the parent do not run here."""
    global _switch_lock, _n_providers
    _switch_lock = threading.Lock()
    if _n_providers > 0:
        sys.setswitchinterval(_usual_interval_s)
    _n_providers = 0


os.register_at_fork(after_in_child=_forget_providers)
