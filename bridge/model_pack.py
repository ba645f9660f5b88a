"""From a model and what the user says of its pack to an open pack that belongs to it."""

from __future__ import annotations

import os
from typing import Any

from ..pypack.errors import GGUFError
from ..pypack.format.layout import Layer
from ..pypack.format.pack import Pack, open_pack
from ..pypack.ggml_types import NOT_COMPUTED_TYPES
from ..pypack.source.match import check_source, find_pack
from ..pypack.values.checks import check_count


def open_checked(model_path: str, expert_pack: str | os.PathLike[str] | bool | None) -> Pack:
    """Opens the pack (True or None: the one beside the model) and checks that llama.cpp can run this model with it.

    Raises ExpertPackError, or ValueError if there is no model.
    """
    if not os.path.exists(model_path):  # noqa: PTH110
        raise ValueError(f"Model path does not exist: {model_path}")
    pack = open_pack(find_pack(model_path) if expert_pack is None or isinstance(expert_pack, bool) else expert_pack)
    check_source(pack, model_path)
    for role in (role for layer in pack.layers for role in layer.roles):
        if role.type_name in NOT_COMPUTED_TYPES:
            raise GGUFError(
                f"{model_path}: {role.tensor} is of type {role.type_name}, which llama.cpp cannot multiply with: "
                "quantize the model again to another type"
            )
    return pack


def working_set(pack: Pack, kv_overrides: dict[str, Any] | None = None) -> int:
    """Experts that a token uses in a layer; 1 if neither the model nor an override says.

    Raises UsageError if an override asks for fewer than 1 or more than there are, GGUFError if the model does.
    """
    facts = pack.manifest.model
    most = max(layer.n_expert for layer in pack.layers)
    key = f"{facts.architecture}.expert_used_count"
    if kv_overrides is not None and key in kv_overrides:  # llama.cpp would end the process
        return check_count(f"the override of {key}", kv_overrides[key], 1, most)
    if facts.expert_used_count > most:
        raise GGUFError(
            f"{pack.path}: a token of the model uses {facts.expert_used_count} of {most} experts: "
            "its metadata is wrong, get the model again"
        )
    return max(facts.expert_used_count, 1)


def gpu_layers(pack: Pack, n_gpu_layers: int) -> list[Layer]:
    """The layers that llama.cpp computes on GPUs: the model's last ones, where the output counts as one more.

    All of them if the number is negative.
    """
    first = pack.manifest.model.block_count + 1 - n_gpu_layers if n_gpu_layers >= 0 else 0
    return [layer for layer in pack.layers if layer.block >= first]
