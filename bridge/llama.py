"""``Llama``: llama-cpp-python's class, with the routed experts of the model from a pack."""

from __future__ import annotations

import atexit
import ctypes
import inspect
import logging
import os
import sys
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from ..pypack.errors import DecodeError, UsageError
from ..pypack.gguf.model import read_model
from ..pypack.stats.counters import ExpertStats
from ..pypack.values.checks import check_count
from ..pypack.values.option_tables import keyword_lines, with_keywords
from ..pypack.values.options import OPTIONS, ExpertOptions, is_pack
from . import garbage, interrupts, library
from .batch_sizes import context_bytes
from .buffer_overrides import set_cpu_experts
from .cpu_layers import first_blocks_on_cpu
from .model_pack import open_checked, working_set

llama_cpp = library.load()

from . import shared_pack  # noqa: E402
from .outputs import check_outputs  # noqa: E402
from .provider import Provider  # noqa: E402
from .shared_pack import SharedPack  # noqa: E402

BLOCKS_MAX = 1024
NONE, LAYER = llama_cpp.LLAMA_SPLIT_MODE_NONE, llama_cpp.LLAMA_SPLIT_MODE_LAYER
_CHOOSES_BATCHES = ("n_batch", "n_ubatch")
_NEEDS_ALL_OUTPUTS = ("embedding", "logits_all", "draft_model", "vocab_only")
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
        n_cpu_moe: so many blocks, from the first on, compute their experts on the CPU, as with llama-server's --n-cpu-moe.
        n_batch, n_ubatch: with a pack and neither of them given, as many as memory allows beside the experts, 8192 at most (1024 on the CPU):
            a prompt reads the experts once for each ``n_ubatch`` tokens.
        expert_...: the options in pypack/values/options.py.
        **llama_kwargs: as for ``llama_cpp.Llama``; unlike there, unknown ones are refused.

    With a pack, llama.cpp's weight repacking is off (as with --no-repack): results are those of stock without it.
    Several models of one file share its pack's slots; they need the same expert options.

    Raises:
        ExpertPackError: the pack, the budget, the disk or an option is wrong. DecodeError, a subclass that is also a
            RuntimeError, when an expert could not be read: the state is as before the call, which may be repeated.
        TypeError: an unknown keyword.
        ValueError: the model does not exist or can't be loaded.
    """

    @with_keywords
    def __init__(self, model_path: str | os.PathLike[str], *, n_cpu_moe: int = 0, **llama_kwargs: Any) -> None:
        global _has_loaded
        self._n_cpu_moe = n_cpu_moe
        self._expert_args = {name: llama_kwargs.pop(name) for name in OPTIONS if name in llama_kwargs}  # for pickling
        unknown = sorted(set(llama_kwargs) - _KNOWN)
        if unknown:
            raise TypeError(f"Llama() got unknown keyword arguments: {', '.join(unknown)}")
        self._provider: Provider | None = None
        self._batch_is_ours = self._has_chosen_batch = False
        self._may_share = False  # a pack with other models: it has to be left
        self._must_replay = False
        self._batch_ends: list[int] = []  # token counts at which the evaluated batches ended, rising
        packed = is_pack(self._expert_args.get("expert_pack"))
        given = {  # with a pack also what equals a default: 64.0 is no number of parts
            name: value
            for name, value in self._expert_args.items()
            if not _is_default(name, value) or (packed and not OPTIONS[name].needs)
        }
        try:
            options = ExpertOptions.checked(given)
            check_count("n_cpu_moe", n_cpu_moe, least=0, most=BLOCKS_MAX)
            if is_pack(options.expert_pack):
                shared = self._open_pack(os.fspath(model_path), options, llama_kwargs)
            _has_loaded = True
            super().__init__(os.fspath(model_path), **llama_kwargs)
            if self._provider is not None:
                self._watch_decode(self._provider)
                with interrupts.held_back(), garbage.held_back():
                    self._provider.n_ubatch = max(self._provider.n_ubatch, int(self.context_params.n_ubatch))
                    shared.loaded(has_weights=not llama_kwargs.get("vocab_only", False))
                if self.verbose and self._provider.arena_bytes:
                    print(self._provider.summary(), file=sys.stderr)
                _open.add(self)
        except BaseException:
            self.close()
            raise

    def _open_pack(self, model_path: str, options: ExpertOptions, llama_kwargs: dict[str, Any]) -> SharedPack:
        """Before the model is loaded. Changes ``llama_kwargs`` where they do not go with a pack. Raises ExpertPackError."""
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
        pack = open_checked(model_path, options.expert_pack)
        check_outputs(model_path, pack, options)
        top_k = working_set(pack, llama_kwargs.get("kv_overrides"))
        on_cpu = first_blocks_on_cpu(pack.layers, self._n_cpu_moe)
        self._may_share = True
        shared = shared_pack.enter(self, pack, model_path, options, top_k=top_k, on_cpu=on_cpu)
        self._provider = shared.provider
        if llama_kwargs.get("use_mlock", False):
            llama_kwargs["use_mmap"] = False  # locking a mapping would lock the experts in it
        if not any(llama_kwargs.get(name) for name in (*_CHOOSES_BATCHES, *_NEEDS_ALL_OUTPUTS)):
            self._batch_is_ours = True
            if llama_kwargs.get("n_ctx") == 0:  # as long as the model's
                key = f"{pack.manifest.model.architecture}.context_length"
                length = (llama_kwargs.get("kv_overrides") or {}).get(key, read_model(model_path).metadata.get(key))
                self._batch_is_ours = isinstance(length, int)
                llama_kwargs["n_ctx"] = length if self._batch_is_ours else 0
        return shared

    def _choose_batch(self) -> None:
        """The model is loaded, the context not made yet."""
        assert self._provider is not None
        params = self.context_params
        model, address = ctypes.cast(self._model.model, ctypes.c_void_p).value or 0, ctypes.addressof(params)
        n_outputs = params.n_batch  # as many as there are without us; llama.cpp reserves logits for each
        params.n_outputs_max = n_outputs
        chosen = self._provider.plan_batch(params.n_ctx, lambda n: context_bytes(model, address, n))
        self.n_batch = params.n_batch = params.n_ubatch = chosen
        params.n_outputs_max = min(n_outputs, chosen)

    def expert_stats(self) -> ExpertStats:
        """What the expert cache has counted since the model was loaded, or the first of those that share it.

        Raises UsageError without a pack.
        """
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
        """Free the model, then the pack, unless other models of the file share it. Further calls do nothing; any other use
        raises RuntimeError.

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
        if getattr(self, "_may_share", False):
            shared_pack.leave(self)
            self._may_share = False

    def _forget(self) -> None:
        """In a forked child: nothing is freed, read or written here that is the parent's."""
        for part in (self, *(vars(self).get(name) for name in ("_model", "_ctx", "_batch"))):
            for name in ("_stack", "_exit_stack"):
                callbacks = getattr(part, "__dict__", {}).get(name)
                if callbacks is not None:
                    callbacks.pop_all()
        inherited: Any = _Inherited()  # the pack forgets itself
        if not isinstance(vars(self)["_model"], _Closed):
            self.__dict__.update(_model=inherited, _ctx=inherited, _batch=inherited, tokenizer_=inherited)
        self._provider = inherited

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "n_cpu_moe": self._n_cpu_moe, **self._expert_args}
        return {name: value for name, value in state.items() if not (self._batch_is_ours and name in _CHOOSES_BATCHES)}

    # llama_cpp assigns it when it has loaded it, and makes the context afterwards
    @property
    def _model(self) -> Any:
        try:
            return vars(self)["_model"]
        except KeyError:
            raise AttributeError("_model") from None

    @_model.setter
    def _model(self, model: Any) -> None:
        self.__dict__["_model"] = model
        if self._batch_is_ours and not self._has_chosen_batch:
            self._has_chosen_batch = True
            self._choose_batch()

    # llama_cpp assigns the parameters once and loads the model with them; this is the only place to change them.
    @property
    def model_params(self) -> Any:
        """llama.cpp's parameters of the model, as ``llama_cpp.Llama`` has them."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        if self._provider is not None:
            params.use_extra_bufts = False  # repacked weights compute in another order
        if self._n_cpu_moe:
            self._overrides = set_cpu_experts(params, self._n_cpu_moe)
        self._model_params = params

    def _watch_decode(self, provider: Provider) -> None:
        """Turn llama_decode's return code into the reason that the provider knows."""
        decode = self._ctx.decode

        def watched(batch: Any) -> None:
            provider.take_error()  # of a computation past this, that nobody asked about
            try:
                with interrupts.held_back(provider.cancel), garbage.held_back():
                    decode(batch)
            except RuntimeError as error:
                why = provider.take_error()
                if not why:
                    raise
                raise DecodeError(why) from error
            finally:
                provider.cancel(False)

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


def _is_default(name: str, value: object) -> bool:
    """Also of values that can't be compared: an array is none, and is refused like any other wrong value."""
    return (value == OPTIONS[name].default) is True


_OPTIONS_LINE = "expert_...: the options in pypack/values/options.py."  # what is read without running
Llama.__doc__ = (Llama.__doc__ or "").replace(_OPTIONS_LINE, keyword_lines(" " * 8).lstrip())
