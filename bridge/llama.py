"""``Llama``: llama-cpp-python's class, with the routed experts of the model from a pack."""

from __future__ import annotations

import atexit
import inspect
import logging
import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from ..pypack.drive.reader import Verify
from ..pypack.errors import DecodeError, UsageError
from ..pypack.policy import DEFAULT_POLICY
from ..pypack.stats.counters import ExpertStats
from ..pypack.stats.stats_file import StatsWriter
from ..pypack.values.checks import check_path
from . import garbage, interrupts, library, openmp  # noqa: F401 (openmp acts at forks)
from .model_pack import open_checked, working_set

llama_cpp = library.load()

from .outputs import TraceFile, check_outputs  # noqa: E402
from .provider import Provider  # noqa: E402

NONE, LAYER = llama_cpp.LLAMA_SPLIT_MODE_NONE, llama_cpp.LLAMA_SPLIT_MODE_LAYER
_KNOWN = frozenset(inspect.signature(llama_cpp.Llama.__init__).parameters) - {"self", "kwargs"}


_log = logging.getLogger(__name__)
_open: WeakSet[Llama] = WeakSet()
_has_loaded = False
_forked_after_a_load = False


@atexit.register
def _close_all() -> None:
    """Later, when Python frees what is left, daemon threads no longer run, and close() would wait for them forever."""
    for llm in list(_open):
        llm.close()


def _forget_all() -> None:
    """In a forked child: no thread of the parent's runs here, and what it reads and writes is none of the child's."""
    global _forked_after_a_load
    _forked_after_a_load = _has_loaded
    for llm in list(_open):
        try:
            llm._forget()
        except Exception:  # the others must be forgotten all the same
            _log.exception("a model of the parent could not be let go of completely")
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)


def _refuse_without_pack(options: dict[str, Any]) -> None:
    """Raises UsageError if an option is set that does nothing without a pack."""
    usual = inspect.signature(Llama.__init__).parameters
    unused = [name for name, value in options.items() if name != "expert_pack" and value != usual[name].default]
    if unused:
        raise UsageError(
            f"{', '.join(unused)} would have no effect without expert_pack: give expert_pack=True or the path of the "
            f"pack, or leave {'it' if len(unused) == 1 else 'them'} out"
        )


def _refuse_interval_alone(interval_s: object) -> None:
    if interval_s != inspect.signature(Llama.__init__).parameters["expert_stats_interval"].default:
        raise UsageError(
            "expert_stats_interval would have no effect without expert_stats_path: give expert_stats_path, or leave it out"
        )


class _Closed:
    """Takes the place of the native objects of a closed model."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("this Llama is closed")


class _Inherited:
    """Takes their place in a forked child."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            "this Llama belongs to the process that forked this one: open a model in the process that uses it"
        )


class Llama(llama_cpp.Llama):  # type: ignore[name-defined, misc]
    """Drop-in for ``llama_cpp.Llama``; with ``expert_pack`` the routed experts are read from a pack when needed.

    Args:
        model_path: the GGUF; its first shard if it is split.
        expert_pack: path of the pack, True for the one beside the model, None for stock behaviour; the other
            options of experts are refused then.
        expert_cache: memory for experts, on each device that computes layers: bytes, "20GiB", "60%" of what is free
            after the reserve, or "auto" (all experts if they fit in all of that on a GPU, in half of it on the CPU,
            else as many as fit). Less than one working set is refused.
        expert_cache_reserve: memory to leave free, in the same units.
        expert_direct_io: read with O_DIRECT; False reads through the page cache.
        expert_read_splits: parts that one expert is read in at most, in parallel; 1 to 1024.
        expert_stage_slots: experts that are read at the same time at most; 1 to 1024.
        expert_verify: check experts' checksums at the "first" read, at "every" read, or "off".
        expert_policy: which experts leave the cache, one of ``pypack.POLICIES``; docs/POLICY.md compares them.
        expert_trace: file that gets every lookup of experts, for ``expert-pack replay`` and ``expert-pack heat``.
        expert_stats_path: file that gets the counters as JSON, every expert_stats_interval seconds and at close.
        **llama_kwargs: as for ``llama_cpp.Llama``; unlike there, unknown ones are refused.

    With a pack, llama.cpp's weight repacking is off (as with --no-repack): results are those of stock without it.

    Raises:
        ExpertPackError: the pack, the budget, the disk or an option is wrong. DecodeError, a subclass that is also a
            RuntimeError, when an expert could not be read: the state is as before the call, which may be repeated.
        TypeError: an unknown keyword.
        ValueError: the model does not exist or can't be loaded.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        expert_pack: str | os.PathLike[str] | bool | None = None,
        expert_cache: str | int | float = "auto",
        expert_cache_reserve: str | int | float = "1GiB",
        expert_direct_io: bool = True,
        expert_read_splits: int = 64,
        expert_stage_slots: int = 12,
        expert_verify: Verify = "first",
        expert_policy: str = DEFAULT_POLICY,
        expert_trace: str | os.PathLike[str] | None = None,
        expert_stats_path: str | os.PathLike[str] | None = None,
        expert_stats_interval: float = 10.0,
        **llama_kwargs: Any,
    ) -> None:
        global _has_loaded
        unknown = sorted(set(llama_kwargs) - _KNOWN)
        if unknown:
            raise TypeError(f"Llama() got unknown keyword arguments: {', '.join(unknown)}")
        self._expert_args = {k: v for k, v in locals().items() if k.startswith("expert_")}  # for pickling
        self._provider: Provider | None = None
        self._stats_writer: StatsWriter | None = None
        self._trace: TraceFile | None = None
        self._must_replay = False
        self._batch_ends: list[int] = []  # token counts at which the evaluated batches ended, rising
        model_path = os.fspath(model_path)
        if expert_pack is not None and not isinstance(expert_pack, bool):
            expert_pack = check_path("expert_pack", expert_pack)
        trace_path = None if expert_trace is None else check_path("expert_trace", expert_trace)
        stats_path = None if expert_stats_path is None else check_path("expert_stats_path", expert_stats_path)
        try:
            if expert_pack is not None and expert_pack is not False:
                if llama_kwargs.get("split_mode", LAYER) not in (NONE, LAYER):
                    raise UsageError(
                        "an expert pack can't be used with a split_mode of rows or tensors: "
                        "use LLAMA_SPLIT_MODE_LAYER, or no pack"
                    )
                if _forked_after_a_load and llama_cpp.llama_supports_gpu_offload():
                    raise UsageError(
                        "CUDA does not work in a process that was forked after a model had been loaded: "
                        "start this one with multiprocessing's spawn method, or fork before the first load"
                    )
                if stats_path is None:
                    _refuse_interval_alone(expert_stats_interval)
                pack = open_checked(model_path, expert_pack)
                check_outputs(model_path, pack, {"expert_trace": trace_path, "expert_stats_path": stats_path})
                self._trace = TraceFile(trace_path) if trace_path is not None else None
                self._provider = Provider(
                    pack,
                    model_path,
                    top_k=working_set(pack, llama_kwargs.get("kv_overrides")),
                    cache=expert_cache,
                    reserve=expert_cache_reserve,
                    direct_io=expert_direct_io,
                    read_splits=expert_read_splits,
                    stage_slots=expert_stage_slots,
                    verify=expert_verify,
                    policy=expert_policy,
                    trace=self._trace,
                )
            else:
                _refuse_without_pack(self._expert_args)
            _has_loaded = True
            if self._provider is not None and llama_kwargs.get("use_mlock", False):
                llama_kwargs = {**llama_kwargs, "use_mmap": False}  # locking a mapping would lock the experts in it
            super().__init__(model_path, **llama_kwargs)
            if self._provider is not None:
                self._watch_decode(self._provider)
                with interrupts.held_back(), garbage.held_back():
                    self._provider.start(has_weights=not llama_kwargs.get("vocab_only", False))
                if stats_path is not None:
                    self._stats_writer = StatsWriter(stats_path, expert_stats_interval, self._provider.stats)
                _open.add(self)
        except BaseException:
            self.close()
            raise

    def expert_stats(self) -> ExpertStats:
        """What the expert cache has counted since the model was loaded. Raises UsageError without a pack."""
        if self._provider is None:
            raise UsageError("this Llama has no expert pack, so there are no expert statistics")
        return self._provider.stats()

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after those evaluated before.

        Raises DecodeError if an expert could not be read; the call may be repeated.
        """
        if self._provider is None:
            super().eval(tokens)
            return
        if self._must_replay:
            self._replay()
        n_before = self.n_tokens
        try:
            super().eval(tokens)
        except BaseException:
            self._roll_back(n_before)
            raise
        self._note_batches(n_before)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As ``llama_cpp.Llama.embed``. If it raises, nothing is evaluated, as after it."""
        try:
            return super().embed(*args, **kwargs)
        except DecodeError:
            self._ctx.kv_cache_clear()
            self.reset()
            raise

    def save_state(self) -> Any:
        """As ``llama_cpp.Llama.save_state``. Raises DecodeError like eval()."""
        if self._must_replay:
            self._replay()
        return super().save_state()

    def load_state(self, state: Any) -> None:
        """As ``llama_cpp.Llama.load_state``."""
        super().load_state(state)
        self._must_replay = False

    def reset(self) -> None:
        """Forget all evaluated tokens."""
        self._must_replay = False
        super().reset()

    def close(self) -> None:
        """Free the model, then the pack. Further calls do nothing; any other use raises RuntimeError.

        With a pack, the end of the process closes what is still open. In a forked child, close() leaves all that is the
        parent's to it.
        """
        if isinstance(getattr(self, "_provider", None), _Inherited):
            return
        if getattr(self, "_stack", None) is not None:
            super().close()
            for name in ("_model", "_ctx", "_batch", "tokenizer_"):
                if hasattr(self, name):
                    setattr(self, name, _Closed())
        for name in ("_stats_writer", "_provider", "_trace"):
            part = getattr(self, name, None)
            if part is not None:
                part.close()

    def _forget(self) -> None:
        """In a forked child: nothing is freed, read or written here that is the parent's."""
        for part in (self, *(vars(self).get(name) for name in ("_model", "_ctx", "_batch"))):
            for name in ("_stack", "_exit_stack"):
                callbacks = getattr(part, "__dict__", {}).get(name)
                if callbacks is not None:
                    callbacks.pop_all()
        inherited: Any = _Inherited()
        if not isinstance(vars(self)["_model"], _Closed):
            self.__dict__.update(_model=inherited, _ctx=inherited, _batch=inherited, tokenizer_=inherited)
        provider, outputs = self._provider, (self._stats_writer, self._trace)
        self._provider, self._stats_writer, self._trace = inherited, None, None
        if provider is not None:
            provider.forget()
        for output in outputs:
            if output is not None:
                output.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **self._expert_args}

    # llama_cpp assigns the parameters once and loads the model with them; this is the only place to change them.
    @property
    def model_params(self) -> Any:
        """llama.cpp's parameters of the model, as ``llama_cpp.Llama`` has them."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        if self._provider is not None:
            params.use_extra_bufts = False  # repacked weights compute in another order
        self._model_params = params

    def _watch_decode(self, provider: Provider) -> None:
        """Turn llama_decode's return code into the reason that the provider knows."""
        decode = self._ctx.decode

        def watched(batch: Any) -> None:
            n_failures = provider.n_failures()
            try:
                with interrupts.held_back(), garbage.held_back():
                    decode(batch)
            except RuntimeError as error:
                if provider.n_failures() == n_failures:
                    raise
                raise DecodeError(provider.take_error()) from error

        self._ctx.decode = watched

    def _roll_back(self, n_before: int) -> None:
        """Bring back the state of n_before tokens, now or, where the memory can't be cut, at the next eval."""
        self.n_tokens = n_before
        self._requires_eval = True  # the context holds no logits of these tokens
        memory = llama_cpp.llama_get_memory(self._ctx.ctx)
        cuts_exactly = not (self._is_recurrent or self._is_hybrid or llama_cpp.llama_model_n_swa(self._model.model) > 0)
        if not (cuts_exactly and llama_cpp.llama_memory_seq_rm(memory, -1, n_before, -1)):
            self._must_replay = True

    def _replay(self) -> None:
        """Evaluate what was evaluated before, in the same batches: others would round differently."""
        kept = self.input_ids[: self.n_tokens].tolist()
        ends = self._batch_ends[: bisect_right(self._batch_ends, len(kept))]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx.ctx), True)
        self.n_tokens = 0
        try:
            for start, end in zip([0, *ends], [*ends, len(kept)], strict=True):
                super().eval(kept[start:end])
        except BaseException:
            self.n_tokens = len(kept)
            raise
        self._must_replay = False

    def _note_batches(self, n_before: int) -> None:
        del self._batch_ends[bisect_right(self._batch_ends, n_before) :]
        self._batch_ends += [*range(n_before + self.n_batch, self.n_tokens, self.n_batch), self.n_tokens]
