"""A picture of which experts a recorded run used: a row a layer, a column an expert."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..printable import printable
from ..system.output_file import refuse_same_file, write_output
from ..system.plotting import pyplot
from ..trace.trace import Trace


def use_counts(trace: Trace) -> NDArray[np.float64]:
    """[n_layers, most experts of a layer] acquires that asked for the expert; NaN where a layer has none."""
    acquires = trace.only_acquires()
    counts = np.bincount(acquires.keys(), minlength=trace.n_keys)
    table = np.full((len(trace.layers), max(layer.n_expert for layer in trace.layers)), np.nan)
    for row, layer in zip(table, trace.layers, strict=True):
        row[: layer.n_expert] = counts[layer.first_key : layer.first_key + layer.n_expert]
    return table


def draw_heat(trace: Trace, path: Path, *, ranked: bool = False) -> None:
    """Write a PNG or SVG. ``ranked``: each layer's experts from the most to the least used.

    Raises :class:`UsageError` if matplotlib is missing or the file can't be written, is the trace or no picture.
    """
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"{path}: a heat map is a .png or .svg file")
    refuse_same_file({"the heat map": path}, {"the trace": trace.path})
    plot = pyplot("agg" if path.suffix == ".png" else "svg", "the heat map")
    counts = use_counts(trace)
    if ranked:
        counts = -np.sort(-counts, axis=1)  # NaN stays last
    n_steps = int(trace.step.max()) + 1 if len(trace.step) else 0
    height = min(12.0, 2.0 + 0.16 * len(counts))
    figure, axes = plot.subplots(figsize=(11, height), layout="constrained")
    image = axes.imshow(100 * counts / max(1, n_steps), aspect="auto", interpolation="nearest", cmap="magma", vmin=0)
    figure.colorbar(image, label="% of the batches that used the expert")
    axes.set_xlabel("expert, most used first" if ranked else "expert")
    axes.set_ylabel("layer with experts")
    title = f"{printable(Path(trace.path).name)}: {n_steps} batches, top {trace.top_k}"
    axes.set_title(title, fontsize=10, parse_math=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format=path.suffix[1:])
    plot.close(figure)
    try:
        write_output(path, picture.getvalue(), is_picture, "a picture")
    except OSError as error:
        raise UsageError(f"{path}: the heat map can't be written: {error.strerror}") from error


def is_picture(head: bytes) -> bool:
    """Whether a file that starts so is a PNG or an SVG."""
    return head.startswith((b"\x89PNG", b"<?xml", b"<svg"))
