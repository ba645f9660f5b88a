"""From a model and what the user says of its pack to an open pack that belongs to it."""

from __future__ import annotations

import os
from typing import Any

from pypack.errors import GGUFError
from pypack.ggml_types import NOT_COMPUTED_TYPES
from pypack.pack import Pack, find_pack, open_pack


def open_checked(model_path: str, expert_pack: str | os.PathLike[str] | bool) -> Pack:
    """Opens the pack (True: the one beside the model) and checks that llama.cpp can run this model with it.

    Raises ExpertPackError, or ValueError if there is no model.
    """
    if not os.path.exists(model_path):  # noqa: PTH110
        raise ValueError(f"Model path does not exist: {model_path}")
    pack = open_pack(find_pack(model_path) if isinstance(expert_pack, bool) else expert_pack)
    pack.check_source(model_path)
    for role in (role for layer in pack.layers for role in layer.roles):
        if role.type_name in NOT_COMPUTED_TYPES:
            raise GGUFError(
                f"{model_path}: {role.tensor} is of type {role.type_name}, which llama.cpp cannot multiply with: "
                "quantize the model again to another type"
            )
    return pack


def working_set(pack: Pack, kv_overrides: dict[str, Any] | None = None) -> int:
    """Experts that a token uses in a layer; 1 if neither the model nor an override says."""
    facts = pack.manifest.model
    override = (kv_overrides or {}).get(f"{facts.architecture}.expert_used_count", facts.expert_used_count)
    return max(int(override), 1)
