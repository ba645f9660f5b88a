"""The options of a model with an expert pack. Each is a row of :class:`ExpertOptions`: from it come ``Llama``'s keywords,
llama-server's flags (``flags.py``), the tables of the documentation (``option_tables.py``) and the checks of values.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ..errors import UsageError
from .checks import as_number, as_seconds, check_choice, check_count, check_path, check_seconds, check_switch
from .sizes import check_size, size_meaning

READ_SPLITS_MAX = 1024
STAGE_SLOTS_MAX = 1024  # each may be a block of page-locked memory
Verify = Literal["first", "off", "every"]
VERIFY_MODES: tuple[Verify, ...] = ("first", "off", "every")


@dataclass(frozen=True)
class Kind:
    """What values an option takes. ``check(name, value)`` gives the value to use, or raises UsageError."""

    check: Callable[[str, Any], Any]
    read: Callable[[str], Any] = str  # the value that a flag's text means; text that means none is left to check
    meaning: Callable[[Any], Any] = lambda value: value  # equal for values that mean the same
    words: Mapping[str, Any] = field(default_factory=dict)  # texts of a flag for values that are no text


def _optional_path(name: str, value: object) -> str | None:
    return None if value is None else check_path(name, value)


def _place(path: str | None) -> str | None:
    return None if path is None else os.path.realpath(path)


_PACK = Kind(
    lambda name, value: value if isinstance(value, bool) else _optional_path(name, value),
    words={"auto": True, "none": None},
)
_PATH = Kind(_optional_path, meaning=_place)
_SIZE = Kind(check_size, meaning=size_meaning)
_SIZE_OR_AUTO = Kind(partial(check_size, or_auto=True), meaning=size_meaning)
_SECONDS = Kind(check_seconds, as_seconds)
_SWITCH = Kind(check_switch, words={"on": True, "off": False})
_SPLITS = Kind(partial(check_count, least=1, most=READ_SPLITS_MAX), as_number)
_SLOTS = Kind(partial(check_count, least=1, most=STAGE_SLOTS_MAX), as_number)
_VERIFY = Kind(partial(check_choice, choices=VERIFY_MODES))
_POLICY = Kind(lambda name, value: value)  # make_policy knows the names


def _row(kind: Kind, hint: str, help: str, meaning: str, **more: str) -> dict[str, Any]:
    return {"kind": kind, "hint": hint, "help": help, "meaning": meaning, **more}


# fmt: off
@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """The values of all options. :meth:`checked` makes them from what a user gave; paths are ``str`` then."""

    expert_pack: str | os.PathLike[str] | bool | None = field(default=None, metadata=_row(
        _PACK, "{PATH,auto,none}",
        "take the routed experts from this expert pack; auto: the one beside the model\n"
        "(default: none, stock behaviour; weights are not repacked with a pack)",
        "path of the pack; `True`: the one beside the model; `None`: no pack, the others are refused then"))
    expert_cache: str | int | float = field(default="auto", metadata=_row(
        _SIZE_OR_AUTO, "{SIZE,N%,auto}",
        "memory for experts on each device that computes expert layers: 20GiB, or 60% of what is free after the reserve; "
        "auto: all experts if they fit in half of that (on a GPU: in all of it), else that half (or all) (default: {default})",
        'memory for experts on each device that computes expert layers: bytes, `"20GiB"`, or `"60%"` of what is free after the '
        'reserve. `"auto"`: all experts if they fit in half of that (on a GPU: in all of it), else that half (or all). Never '
        "more than what is free after the reserve"))
    expert_cache_reserve: str | int | float = field(default="1GiB", metadata=_row(
        _SIZE, "{SIZE,N%}", "memory that the expert cache leaves free (default: {default})",
        'memory to leave free, in bytes or `"1GiB"`; `"10%"` means of the host\'s free memory'))
    expert_ram: str | int | float = field(default="auto", metadata=_row(
        _SIZE_OR_AUTO, "{SIZE,N%,auto}",
        "host memory for experts beside that of GPUs, which read them there in place, and for layers on the CPU: 64GiB, or 60% "
        "of what is free after the reserve; auto: all of that less a tenth, where a GPU computes experts; 0, or auto without a GPU: "
        "none, layers on the CPU get --expert-cache (default: {default})",
        'host memory for experts beside that of GPUs, which read them there in place, and for layers on the CPU: bytes, '
        '`"64GiB"`, or `"60%"` of what is free after the reserve; `"auto"`: all of that less a tenth, where a GPU computes experts; 0, '
        'or `"auto"` without a GPU: none, layers on the CPU get `expert_cache`. For GPUs it is page-locked bit by bit, as it is '
        "filled"))
    expert_direct_io: bool = field(default=True, metadata=_row(
        _SWITCH, "", "read experts past the page cache, with O_DIRECT (default: {default})",
        "read with `O_DIRECT`; `False`: through the page cache"))
    expert_read_splits: int = field(default=64, metadata=_row(
        _SPLITS, "N", "parts that one expert is read in at most, in parallel, 1 to 1024 (default: {default})",
        "parts of 512 KiB at least (256 for a GPU) that one expert is read in at most, in parallel; 1 to 1024"))
    expert_stage_slots: int = field(default=12, metadata=_row(
        _SLOTS, "N", "experts that are read at the same time at most, 1 to 1024 (default: {default})",
        "experts that are read at the same time at most, 1 to 1024. Each GPU takes so many blocks of page-locked memory"))
    expert_verify: Verify = field(default="first", metadata=_row(
        _VERIFY, "{first,every,off}",
        "check an expert's checksum at its first read, at every read, or not at all (default: {default})",
        'check an expert\'s checksum at its `"first"` read and some later ones, at `"every"` read, or `"off"`. If the pack\'s '
        "file is changed while it is open, every read is checked in any case"))
    expert_policy: str = field(default="adaptive", metadata=_row(
        _POLICY, "NAME", "policy that chooses which experts leave the cache; a wrong name lists them",
        "which experts leave the cache; docs/POLICY.md lists and compares the policies"))
    expert_trace: str | os.PathLike[str] | None = field(default=None, metadata=_row(
        _PATH, "FNAME", "file that gets every lookup of experts, to replay with other policies",
        "file, new or an older trace, that gets every lookup of experts, for `expert-pack replay` and `expert-pack heat`"))
    expert_stats_path: str | os.PathLike[str] | None = field(default=None, metadata=_row(
        _PATH, "FNAME", "file that gets the expert cache's counters as JSON",
        "file that gets the statistics as JSON; a device or a FIFO gets them line by line", flag="--expert-stats-file"))
    expert_stats_interval: float = field(default=10.0, metadata=_row(
        _SECONDS, "SECONDS", "seconds between updates of the statistics file (default: {default})",
        "seconds between its updates", needs="expert_stats_path"))
    # fmt: on

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> ExpertOptions:
        """The options of which ``given`` were given. Raises UsageError for a value that can't be, and for an option that
        does nothing without another one."""
        unused = [name for name in given if name != "expert_pack"]
        if unused and not is_pack(given.get("expert_pack")):
            raise UsageError(
                f"{', '.join(unused)} would have no effect without expert_pack: give expert_pack=True or the path of the "
                f"pack, or leave {'it' if len(unused) == 1 else 'them'} out"
            )
        options = cls(**{name: OPTIONS[name].kind.check(name, value) for name, value in given.items()})
        for name in given:
            needed = OPTIONS[name].needs
            if needed and getattr(options, needed) is None:
                raise UsageError(f"{name} would have no effect without {needed}: give {needed}, or leave it out")
        return options

    def meanings(self) -> dict[str, Any]:
        """By name, what is equal for two values that mean the same here and now: relative paths depend on the folder."""
        return {name: option.kind.meaning(getattr(self, name)) for name, option in OPTIONS.items()}


@dataclass(frozen=True)
class Option:
    """What is said of an option, its row in full."""

    name: str  # of the keyword
    default: Any
    kind: Kind
    hint: str  # stands for the flag's value; "" for a switch
    help: str  # of the flag; {default} stands for it
    meaning: str  # of the keyword, Markdown
    flag: str
    needs: str = ""  # the option without which it has no effect


def is_pack(value: object) -> bool:
    """Whether this value of ``expert_pack`` asks for a pack."""
    return value is not None and value is not False


OPTIONS = {
    row.name: Option(row.name, row.default, **{"flag": "--" + row.name.replace("_", "-"), **row.metadata})
    for row in dataclasses.fields(ExpertOptions)
}
