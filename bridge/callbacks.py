"""What native calls: a provider's methods, by the handle that it was registered with. No exception passes through C."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from . import garbage
from ._provider import ffi, lib

if TYPE_CHECKING:
    from .provider import Provider

_log = logging.getLogger(__name__)


def callbacks_of(handle: Any) -> Any:
    """An ``expert_provider`` for the provider with this handle."""
    callbacks = ffi.new("expert_provider *")
    callbacks.abi_version, callbacks.struct_size = lib.EXPERT_ABI_VERSION, ffi.sizeof("expert_provider")
    callbacks.user = handle
    callbacks.open_arena, callbacks.choose_slots = lib.expert_pack_open_arena, lib.expert_pack_choose_slots
    callbacks.prepare, callbacks.read = lib.expert_pack_prepare, lib.expert_pack_read
    callbacks.may_take, callbacks.withdraw = lib.expert_pack_may_take, lib.expert_pack_withdraw
    callbacks.plan = lib.expert_pack_plan
    return callbacks


def text_of(chars: Any) -> str:
    """Native's text; what is no UTF-8 in it is replaced."""
    return ffi.string(chars).decode(errors="replace")  # type: ignore[no-any-return]


def last_error() -> str:
    """Why the last call of this thread failed, one sentence."""
    return text_of(lib.expert_last_error())


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator, unused-ignore]
def expert_pack_open_arena(user: Any, device: Any, free_bytes: int, layers: Any, n_layers: int) -> int:
    provider: Provider = ffi.from_handle(user)
    try:
        provider.open_arena(text_of(device), free_bytes, ffi.unpack(layers, n_layers))
    except Exception as error:
        provider.keep(error)
        return 0
    return 1


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator, unused-ignore]
def expert_pack_choose_slots(
    user: Any, layer: int, missing: Any, n_missing: int, active: Any, n_active: int, kept_layer: int, slots: Any
) -> int:
    provider: Provider = ffi.from_handle(user)
    try:
        wanted, here = ffi.unpack(missing, n_missing), ffi.unpack(active, n_active)
        taken = provider.cache.choose_slots(layer, wanted, here, kept_layer)
    except Exception as error:
        provider.keep(error)
        return 0
    slots[0:n_missing] = taken
    return 1


@ffi.def_extern()  # type: ignore[untyped-decorator, unused-ignore]
def expert_pack_prepare(user: Any, layer: int, fetched: Any, n_fetched: int) -> None:
    provider: Provider = ffi.from_handle(user)
    try:
        provider.cache.prepare(layer, ffi.unpack(fetched, n_fetched))
    except Exception:  # the next fetch asks
        _log.exception("the next slots could not be chosen")


@ffi.def_extern()  # type: ignore[untyped-decorator, unused-ignore]
def expert_pack_read(user: Any, layer: int, expert: int, slot: int) -> None:
    provider: Provider = ffi.from_handle(user)
    provider.read(layer, expert, slot)


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator, unused-ignore]
def expert_pack_may_take(user: Any, n_bytes: int) -> int:
    provider: Provider = ffi.from_handle(user)
    try:
        return int(provider.may_take(n_bytes))
    except Exception:  # then none is taken
        _log.exception("how much host memory is free could not be found out")
        return 0


@ffi.def_extern(error=0)  # type: ignore[untyped-decorator, unused-ignore]
def expert_pack_withdraw(user: Any, slots: Any, n_slots: int) -> int:
    provider: Provider = ffi.from_handle(user)
    try:
        provider.withdraw(ffi.unpack(slots, n_slots))
    except Exception as error:
        provider.keep(error)
        return 0
    return 1


@ffi.def_extern()  # type: ignore[untyped-decorator, unused-ignore]
def expert_pack_plan(user: Any) -> None:
    provider: Provider = ffi.from_handle(user)
    try:
        with garbage.held_back(may_collect=False):  # a model that is collected here would wait for this thread
            provider.cache.tiers.plan()
    except Exception:  # all stays where it is
        _log.exception("what changes places between GPU and host memory could not be chosen")
