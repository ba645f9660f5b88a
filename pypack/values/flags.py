"""llama-server's spelling of the options: flags, variables, help, and what messages call them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .options import OPTIONS, Option

_LONGEST_FIRST = "|".join(sorted(OPTIONS, key=len, reverse=True))
_KEYWORD = re.compile(rf"(?<![\w./-])({_LONGEST_FIRST})(=\w+)?(?![\w/-]|\.\w)")


def flag_off(option: Option) -> str | None:
    """The flag that turns a switch off; None: the option is no switch, its flag takes a value."""
    return None if option.hint else option.flag.replace("--", "--no-", 1)


def flag_help(option: Option) -> str:
    """The help of the flag, with its default as a flag says it."""
    default = "enabled" if option.default is True else option.default
    return option.help.format(default=f"{default:g}" if isinstance(default, float) else default)


def flag_variable(option: Option) -> str:
    """The environment variable that does what the flag does, named as llama.cpp names its own."""
    return "LLAMA_ARG_" + option.flag[2:].upper().replace("-", "_")


def values_of_flags(texts: Mapping[str, str]) -> dict[str, Any]:
    """Values by keyword, unchecked, from texts by flag; a switch has ``"on"`` or ``"off"``."""
    given = ((option, texts[option.flag]) for option in OPTIONS.values() if option.flag in texts)
    return {
        option.name: option.kind.words[text] if text in option.kind.words else option.kind.read(text)
        for option, text in given
    }


def with_flags(message: str) -> str:
    """The message with the server's flags in place of the keywords of ``Llama`` that it names."""
    return _KEYWORD.sub(lambda match: _spelled(OPTIONS[match[1]], match[2] or ""), message)


def _spelled(option: Option, value: str) -> str:
    """``value``: "=True" and the like, or ""."""
    for word, meant in option.kind.words.items():
        if value == f"={meant}":
            off = flag_off(option)
            return f"{option.flag} {word}" if off is None else option.flag if meant else off
    return option.flag + value
