"""replay.c, compiled when it is first needed."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.replaying.belady import Belady, BeladyBypass, future_of
from bench.replaying.cache import Counts
from llama_expert_pack.pypack.errors import ExpertPackError
from llama_expert_pack.pypack.policy.admission import ByBudget, TinyLfu
from llama_expert_pack.pypack.policy.base import Policy
from llama_expert_pack.pypack.policy.pool import Pool
from llama_expert_pack.pypack.policy.queues import Arc, S3Fifo, Slru
from llama_expert_pack.pypack.policy.scores import AgedLfu, FreqAge, FreqThenRecency, Lru, StaticHot
from llama_expert_pack.pypack.trace.trace import Trace

__all__ = ["has_twin", "replay_compiled"]

# in the order of replay.c's enum
_TWINS: tuple[type[Policy], ...] = (
    Lru, FreqAge, FreqThenRecency, AgedLfu, StaticHot, Slru, S3Fifo, Arc, TinyLfu, ByBudget, Belady, BeladyBypass,
)  # fmt: skip


class _Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("policy", "n_slots", "limit", "period")]


class _Counts(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ("acquires", "hits", "misses", "evictions", "decode_hits", "decode_misses")
    ]


def has_twin(trace: Trace, pools: Sequence[Pool], policy: Policy) -> bool:
    return all(type(policy.for_pool(pool, trace.n_keys)) in _TWINS for pool in pools)


def replay_compiled(trace: Trace, pools: Sequence[Pool], policy: Policy) -> Counts:
    """As :func:`bench.replaying.cache.replay`, for policies that replay.c has too."""
    trace = trace.only_acquires()
    keys = np.ascontiguousarray(trace.keys(), np.int64)
    specs = (_Spec * len(pools))(*[_spec(policy.for_pool(pool, trace.n_keys), pool) for pool in pools])
    pool_of_layer = np.zeros(len(trace.layers), np.int32)
    for index, pool in enumerate(pools):
        pool_of_layer[list(pool.layers)] = index
    pool_of_key = np.repeat(pool_of_layer, [layer.n_expert for layer in trace.layers])
    needs_future = any(spec.policy >= _TWINS.index(Belady) for spec in specs)
    future = future_of(trace.start, keys) if needs_future else np.zeros(len(keys), np.int64)
    counts = _Counts()
    done = _library().replay(
        ctypes.c_int64(len(trace.layer)), ctypes.c_int64(trace.n_keys), _at(trace.start),
        _at(pool_of_layer[trace.layer]), _at((trace.number <= trace.top_k).astype(np.uint8)),
        _at(keys), _at(future), _at(pool_of_key), ctypes.c_int64(len(pools)), specs, ctypes.byref(counts),
    )  # fmt: skip
    if not done:
        raise ExpertPackError(
            f"{trace.path}: there is not enough memory to replay {trace.n_keys} experts in {len(pools)} pools: free some"
        )
    return Counts(*[getattr(counts, name) for name, _ in _Counts._fields_])  # type: ignore[misc]


def _spec(policy: Policy, pool: Pool) -> _Spec:
    limit_names: dict[type[Policy], str] = {
        StaticHot: "_n_pinned",
        Slru: "_n_protected_max",
        S3Fifo: "_n_small_max",
        TinyLfu: "_n_window_max",
        ByBudget: "_offset",
    }
    kind: type[Policy] = type(policy)
    limit = getattr(policy, limit_names[kind]) if kind in limit_names else 0
    period = 1
    if isinstance(policy, StaticHot):
        period = policy._freeze_at
    elif isinstance(policy, AgedLfu | ByBudget | TinyLfu):
        period = policy._aged.period
    return _Spec(_TWINS.index(kind), pool.n_slots, limit, period)


def _at(array: NDArray[np.generic]) -> ctypes.c_void_p:
    """The address of an array that its caller keeps alive during the call."""
    _alive.append(array)
    del _alive[:-32]
    return array.ctypes.data_as(ctypes.c_void_p)


_alive: list[NDArray[np.generic]] = []


@functools.cache
def _library() -> ctypes.CDLL:
    source = Path(__file__).with_name("replay.c")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replay.so"
        command = [os.environ.get("CC", "cc"), "-O3", "-shared", "-fPIC", str(source), "-o", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or error
            raise ExpertPackError(f"{source} can't be compiled: install gcc, or set CC: {said}") from error
        return ctypes.CDLL(str(path))
