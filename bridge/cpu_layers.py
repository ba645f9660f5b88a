"""Layers whose experts are computed on the CPU wherever the rest of the model is: what --cpu-moe, --n-cpu-moe and
--override-tensor ask for, and ``n_cpu_moe`` of ``Llama``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..pypack.errors import UsageError
from ..pypack.format.layout import Layer
from ..pypack.values.checks import shown

CPU_BUFFERS = re.compile(r"CPU|.*_Host")  # names of buffer types; page-locked memory stands for the CPU

_CLASSES = {
    "digit": "0-9",
    "alpha": "a-zA-Z",
    "alnum": "a-zA-Z0-9",
    "lower": "a-z",
    "upper": "A-Z",
    "space": r"\s",
    "w": r"\w",
}


def first_blocks_on_cpu(layers: Iterable[Layer], n_blocks: int) -> frozenset[int]:
    """Indices of the expert layers in the model's first ``n_blocks`` blocks."""
    return frozenset(layer.index for layer in layers if layer.block < n_blocks)


def layers_on_cpu(layers: Iterable[Layer], overrides: Sequence[tuple[str, str]]) -> frozenset[int]:
    """Indices of the layers that ``overrides``, (pattern, name of the buffer type) in order, place on the CPU.

    As in llama.cpp the first pattern that is found in a tensor's name counts. Raises UsageError if one places experts
    elsewhere, or a part of a layer only.
    """
    compiled = [(_compiled(pattern), pattern, buffer) for pattern, buffer in overrides]
    found: set[int] = set()
    for layer in layers:
        hits = {_first_hit(role.tensor, compiled) for role in layer.roles}
        if hits == {None}:
            continue
        for hit in hits - {None}:
            if hit is not None and not CPU_BUFFERS.fullmatch(hit[1]):
                raise UsageError(
                    f"--override-tensor {shown(hit[0])} places experts of layer {layer.block} in {hit[1]}, but with an expert pack "
                    "only CPU can be asked for (on which GPU a layer's experts lie follows from --gpu-layers and "
                    "--tensor-split): drop that flag, or drop --expert-pack"
                )
        if None in hits:
            raise UsageError(
                f"--override-tensor places some of the expert weights of layer {layer.block} on the CPU and leaves others, but "
                "with an expert pack a layer's experts are computed in one place: name all of them (ffn_.*_exps), or none"
            )
        found.add(layer.index)
    return frozenset(found)


def _compiled(pattern: str) -> re.Pattern[str]:
    """Of a pattern for C++'s std::regex, which has the classes of POSIX besides."""
    for name, characters in _CLASSES.items():
        pattern = pattern.replace(f"[:{name}:]", characters)
    try:
        if not re.search(r"\[[:.=]", pattern):
            return re.compile(pattern)
    except re.error:
        pass
    raise UsageError(
        f"--override-tensor {shown(pattern)} can't be understood, and may place experts, which come from the expert pack: write "
        "it in another way, or drop it or --expert-pack"
    )


def _first_hit(tensor: str, overrides: Sequence[tuple[re.Pattern[str], str, str]]) -> tuple[str, str] | None:
    return next(((pattern, buffer) for compiled, pattern, buffer in overrides if compiled.search(tensor)), None)
