"""The options in the documentation: the tables of README.md and docs/SERVER.md, ``Llama``'s signature and docstring.

``python -m llama_expert_pack.pypack.values.option_tables`` prints both tables.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from .flags import flag_help, flag_off, flag_variable
from .options import OPTIONS, ExpertOptions, Option

Init = TypeVar("Init", bound=Callable[..., Any])


def keyword_table() -> str:
    """Of README.md: a row for each keyword of ``Llama``."""
    return "\n".join(["| keyword | default | meaning |", "|---|---|---|", *map(_keyword_row, OPTIONS.values())])


def _keyword_row(option: Option) -> str:
    default = json.dumps(option.default) if isinstance(option.default, str) else repr(option.default)
    meaning = re.sub(r"docs/\w+\.md", r"[\g<0>](\g<0>)", option.meaning)
    return f"| `{option.name}` | `{default}` | {meaning} |"


def flag_table() -> str:
    """Of docs/SERVER.md: a row for each flag of the server."""
    return "\n".join(["| flag | variable | meaning |", "|---|---|---|", *map(_flag_row, OPTIONS.values())])


def _flag_row(option: Option) -> str:
    off, variable = flag_off(option), f"`{flag_variable(option)}`"
    flag = f"`{option.flag} {option.hint}`"
    if off is not None:  # llama.cpp's parser derives the second variable
        flag, variable = f"`{option.flag}`, `{off}`", f"{variable}, {variable.replace('ARG_', 'ARG_NO_', 1)}"
    return f"| {flag} | {variable} | {' '.join(flag_help(option).split())} |"


def keyword_lines(indent: str) -> str:
    """The options as arguments in a docstring."""
    lines = (f"{option.name}: {option.meaning.replace('`', '')}." for option in OPTIONS.values())
    return "\n".join(
        textwrap.fill(line, 116, initial_indent=indent, subsequent_indent=indent + "    ") for line in lines
    )


def with_keywords(init: Init) -> Init:
    """Shows the options in the signature of a function that takes them in its last parameter, ``**others``."""
    own, options = inspect.signature(init), inspect.signature(ExpertOptions).parameters.values()
    *first, others = own.parameters.values()
    vars(init)["__signature__"] = own.replace(parameters=[*first, *options, others])
    return init


if __name__ == "__main__":
    print(keyword_table(), flag_table(), sep="\n\n")
