"""What is in a pack, or what would be in the pack of a model, for people and for scripts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from ..format.layout import Layer, payload_bytes, source_bytes
from ..format.manifest import ModelFacts
from ..format.pack import PACK_SUFFIX, open_pack
from ..gguf.model import read_model
from ..placement.budget import plan_pools
from ..printable import printable
from ..source.discover import find_layers
from ..source.fingerprint import model_facts
from ..values.checks import check_path
from ..values.sizes import parse_size


class PoolPrediction(msgspec.Struct, frozen=True):
    """Slots that a budget gives the layers of one block size."""

    block_bytes: int
    n_layers: int
    n_experts: int
    n_slots: int


class Description(msgspec.Struct, frozen=True):
    """``kind``: "pack" or "gguf". ``expert_bytes``: without padding; ``payload_bytes``: with it."""

    kind: str
    path: str
    model: ModelFacts
    n_experts: int
    expert_bytes: int
    payload_bytes: int
    layers: tuple[Layer, ...]
    budget_bytes: int | None
    pools: tuple[PoolPrediction, ...]


def describe(path: str | os.PathLike[str], budget: str | None = None) -> Description:
    """Describes a pack (a name ending in .expert-pack) or a model. Raises ExpertPackError.

    Args:
        budget: cache size such as "20GiB", or "60%" of all experts, to predict slots for one device.
    """
    path = Path(check_path("the path of the model or pack", path))
    if path.suffix == PACK_SUFFIX:
        pack = open_pack(path)
        kind, model, layers = "pack", pack.manifest.model, pack.manifest.layers
    else:
        source = read_model(path)
        kind, model, layers = "gguf", model_facts(source), tuple(find_layers(source))
    total_bytes = payload_bytes(layers)
    budget_bytes = None if budget is None else parse_size(budget, total_bytes, "the budget")
    return Description(
        kind=kind,
        path=printable(path),
        model=model,
        n_experts=sum(layer.n_expert for layer in layers),
        expert_bytes=source_bytes(layers),
        payload_bytes=total_bytes,
        layers=layers,
        budget_bytes=budget_bytes,
        pools=() if budget_bytes is None else _predict(layers, budget_bytes, model),
    )


def _predict(layers: Sequence[Layer], budget_bytes: int, model: ModelFacts) -> tuple[PoolPrediction, ...]:
    plan = plan_pools(layers, budget_bytes, max(1, model.expert_used_count))
    return tuple(
        PoolPrediction(pool.block_bytes, len(pool.layers), pool.n_experts, pool.n_slots) for pool in plan.pools
    )


def to_json(description: Description) -> str:
    """The description as one indented JSON object, in which what can't be printed is escaped: JSON leaves some as it is."""
    text = msgspec.json.format(msgspec.json.encode(description), indent=2).decode()
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def format_table(description: Description) -> str:
    """The description as lines of text; neighbouring layers that are alike share a row."""
    model = description.model
    lines = [
        printable(
            f"{description.path}: {'expert pack' if description.kind == 'pack' else 'model'} of "
            f"{model.name or 'an unnamed model'} ({model.architecture}), top-{model.expert_used_count}"
        ),
        f"{len(description.layers)} layers, {description.n_experts} experts, "
        f"{_size(description.payload_bytes)} in blocks, "
        f"{_size(description.payload_bytes - description.expert_bytes)} of that padding",
        "",
        f"{'layers':>9}  {'blk':>9}  {'group':6}  {'experts':>7}  {'block bytes':>12}  roles",
    ]
    for _, alike in groupby(description.layers, key=_kind_of_layer):
        run = list(alike)
        first, last = run[0], run[-1]
        roles = ", ".join(f"{r.name} {r.type_name} {r.ne[0]}x{r.ne[1]}" for r in first.roles)
        lines.append(
            f"{_span(first.index, last.index):>9}  {_span(first.block, last.block):>9}  {first.group:6}  "
            f"{first.n_expert:>7}  {first.block_bytes:>12}  {roles}"
        )
    if description.budget_bytes is not None:
        lines += ["", f"with a cache of {_size(description.budget_bytes)} on one device:"]
        lines += [
            f"  {pool.n_slots} of {pool.n_experts} experts of {pool.block_bytes} bytes "
            f"({100 * pool.n_slots // pool.n_experts} %, {pool.n_layers} layers)"
            for pool in description.pools
        ]
    return "\n".join(lines)


def _kind_of_layer(layer: Layer) -> tuple[object, ...]:
    roles = tuple((role.name, role.type, role.ne) for role in layer.roles)
    return layer.group, layer.n_expert, roles


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _size(n_bytes: int) -> str:
    value, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"
