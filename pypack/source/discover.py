"""Finds the routed experts of a model: which tensors MUL_MAT_ID alone reads."""

from __future__ import annotations

import re

from ..errors import GGUFError
from ..format.header import ENTRY_BYTES, HEADER_BYTES
from ..format.layout import Layer, Weight, lay_out_pack
from ..gguf.head import Tensor
from ..gguf.model import GGUFModel

# for fullmatch: "$" would let a newline follow
ROUTED_NAME = re.compile(r"blk\.(0|[1-9]\d{0,8})\.ffn_(gate_up|gate|up|down)_(exps|chexps)\.weight", re.ASCII)
_SINGLE_EXPERT_NAME = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight", re.ASCII)
_MAX_KEYS = (1 << 31) - 1


def find_layers(model: GGUFModel) -> list[Layer]:
    """The pack layers of a model, laid out. Raises GGUFError if it has none or they contradict each other."""
    groups: dict[tuple[int, str], list[Weight]] = {}
    for tensor in model.tensors.values():
        match = ROUTED_NAME.fullmatch(tensor.name)
        # A layer of one expert has nothing to route: its tensors are written with two dimensions.
        if match and len(tensor.ne) >= 3 and tensor.ne[3:] in ((), (1,)):
            key = (int(match[1]), match[3])
            groups.setdefault(key, []).append(_weight(match[2], tensor))
    if not groups:
        raise GGUFError(_why_none(model))
    for (block, group), weights in groups.items():
        _check_group(model, block, group, weights)
    layers = lay_out_pack(
        ((block, group, weights) for (block, group), weights in groups.items()), HEADER_BYTES, ENTRY_BYTES
    )
    if layers[-1].first_key + layers[-1].n_expert > _MAX_KEYS:
        raise GGUFError(f"{model.path} has more than {_MAX_KEYS} experts: such a model cannot be packed")
    return layers


def _weight(role: str, tensor: Tensor) -> Weight:
    return Weight(role, tensor.name, tensor.type, (tensor.ne[0], tensor.ne[1], tensor.ne[2]))


def _check_group(model: GGUFModel, block: int, group: str, weights: list[Weight]) -> None:
    first = weights[0]
    for weight in weights[1:]:
        if weight.ne[2] != first.ne[2]:
            raise GGUFError(
                f"{model.path}: {first.tensor!r} has {first.ne[2]} experts but {weight.tensor!r} has "
                f"{weight.ne[2]}: the model is damaged; download or convert it again"
            )


def _why_none(model: GGUFModel) -> str:
    if any(_SINGLE_EXPERT_NAME.fullmatch(name) for name in model.tensors):
        return (
            f"{model.path} keeps each expert in its own tensor, a layout llama.cpp no longer loads: "
            "convert the model again with a current convert_hf_to_gguf.py"
        )
    architecture = model.architecture or "unknown"
    return (
        f"{model.path} has no routed experts (dense model, architecture {architecture!r}): there is nothing "
        "to pack; run it without a pack"
    )
