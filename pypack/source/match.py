"""Which pack belongs to a model: where it lies, and whether it was made from this model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import PackError, SourceMismatchError, UsageError
from ..format.layout import Layer
from ..format.manifest import Source
from ..format.pack import PACK_SUFFIX, Pack
from ..gguf.model import GGUFModel, model_stem, read_model
from ..system.os_errors import os_errors
from ..values.checks import check_path
from .discover import find_layers
from .fingerprint import source_difference, source_fingerprint
from .samples import expert_difference


def pack_path_for(model_path: str | os.PathLike[str]) -> Path:
    """Where the pack of a model lies unless said otherwise: beside it, with its name. Raises UsageError for a folder."""
    if not Path(model_path).name:  # "." or "/"
        raise UsageError(f"{model_path} is a folder: give the path of a GGUF")
    return Path(model_path).with_name(model_stem(model_path) + PACK_SUFFIX)


def find_pack(model_path: str | os.PathLike[str]) -> Path:
    """The pack beside a model. Raises PackError if there is none, UsageError for an impossible path, ReadError."""
    path = pack_path_for(Path(check_path("the path of the model", model_path)))
    with os_errors(path):
        exists = path.exists()
    if not exists:
        raise PackError(
            f"no pack beside the model: {path} does not exist; make it with `expert-pack convert {model_path}`"
        )
    return path


def check_source(pack: Pack, model_path: str | os.PathLike[str], *, sample_experts: bool = True) -> None:
    """Raises SourceMismatchError unless the pack was made from this model.

    Reads nothing of the experts but samples, and not even these if ``sample_experts`` is False. A model that can't be
    read raises what :func:`llama_expert_pack.pypack.gguf.model.read_model` raises.
    """
    model = read_model(model_path)
    with os_errors(model.path):
        difference = difference_to_model(pack, model, source_fingerprint(model), find_layers(model), sample_experts)
    if difference:
        raise SourceMismatchError(
            f"{pack.path} does not belong to {model_path}: {difference}; convert the model again with --force"
        )


def difference_to_model(
    pack: Pack, model: GGUFModel, source: Source, layers: Sequence[Layer], sample_experts: bool = True
) -> str | None:
    """How the pack differs from that of a model with these facts, as part of a sentence; None if it is the one.

    Raises ReadError or OSError.
    """
    difference = source_difference(pack.manifest.source, source)
    if difference is None and pack.manifest.layers != tuple(layers):
        difference = "its layers are not those of the model"
    if difference is None and sample_experts:
        difference = expert_difference(model, layers, pack.path)
        if difference:
            difference += f" (changed or damaged: `expert-pack verify {pack.path} --deep --source {model.path}`)"
    return difference
