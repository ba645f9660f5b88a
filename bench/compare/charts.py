"""Charts of a comparison, as SVG: rates side by side, where a step goes, hit rate and bytes per token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.compare import step_model
from bench.compare.results import PHASES, Line, Row, of_kind, rows

STOCK, OURS, CEILING = "#8a8f98", "#2f6fde", "#d1495b"
PARTS = (("read_s", "SSD", "#d1495b"), ("copy_s", "H2D", "#edae49"), ("compute_s", "computing", "#2f6fde"), ("host_s", "host", "#66a182"))  # fmt: skip
TOKEN_BYTES = 1e6


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def _plt() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "compare", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})  # fmt: skip
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    _plt().close(figure)
    return path


def draw(lines: Sequence[Line], everything: Sequence[Line], folder: Path, name: str) -> list[Path]:
    """Writes NAME-rates.svg, NAME-step.svg and NAME-bytes.svg; those without data are left out."""
    found = rows(lines)
    if not found:
        return []
    title = _title(lines)
    written = [_rates(found, title, folder / f"{name}-rates.svg"), _bytes(found, title, folder / f"{name}-bytes.svg")]
    if (step := _step(lines, everything, title, folder / f"{name}-step.svg")) is not None:
        written.append(step)
    return written


def _title(lines: Sequence[Line]) -> str:
    conditions = of_kind(lines, "conditions")[0]
    return f"{conditions['model_filename']}, {conditions['label']}"


def _colour(row: Row) -> str:
    return OURS if row.side.startswith("ours") else STOCK


def _rates(found: Sequence[Row], title: str, path: Path) -> Path:
    figure, axes = _plt().subplots(1, 2, figsize=(9, 3), layout="constrained")
    for axis, phase in zip(axes, PHASES, strict=True):
        some = [row for row in found if row.phase == phase]
        axis.barh([r.title for r in some], [r.mean_ts for r in some], xerr=[r.sd_ts for r in some], color=[_colour(r) for r in some])  # fmt: skip
        for i, row in enumerate(some):
            if row.ceiling_ts and row.ceiling_ts < 20 * row.mean_ts:
                axis.plot([row.ceiling_ts] * 2, [i - 0.4, i + 0.4], color=CEILING)
        axis.invert_yaxis()
        axis.set_xlabel(f"{phase}, tokens/s (red: what the drive allows)")
    axes[1].set_yticklabels([])
    figure.suptitle(title)
    return _save(figure, path)


def _bytes(found: Sequence[Row], title: str, path: Path) -> Path:
    some = [row for row in found if row.phase == "decode"]
    figure, axes = _plt().subplots(1, 2, figsize=(9, 2.6), layout="constrained")
    axes[0].barh([r.title for r in some], [r.read_bytes_per_token / TOKEN_BYTES for r in some], color=[_colour(r) for r in some])  # fmt: skip
    axes[0].set_xlabel("MB read per decoded token")
    axes[1].barh([r.title for r in some], [100 * (r.hit_rate or 0) for r in some], color=[_colour(r) for r in some])
    axes[1].set_xlabel("hit rate of the expert cache, % (stock has none)")
    axes[1].set_xlim(0, 100)
    axes[1].set_yticklabels([])
    for axis in axes:
        axis.invert_yaxis()
    figure.suptitle(title)
    return _save(figure, path)


def _step(lines: Sequence[Line], everything: Sequence[Line], title: str, path: Path) -> Path | None:
    model, measured = step_model.build(lines, everything), step_model.measured_step_s(lines)
    if model is None or measured is None:
        return None
    measured_s, waited_s = measured
    step = model.step()
    figure, axis = _plt().subplots(figsize=(9, 1.8), layout="constrained")
    left = 0.0
    for name, label, colour in PARTS:
        width = getattr(step, name) * 1e3
        axis.barh(["model"], [width], left=left, color=colour, label=label)
        left += width
    axis.barh(["measured"], [waited_s * 1e3], color=CEILING, alpha=0.6, label="waiting for experts")
    axis.barh(["measured"], [(measured_s - waited_s) * 1e3], left=waited_s * 1e3, color=STOCK, label="all else")
    axis.invert_yaxis()
    axis.set_xlabel("ms per decoded token, ours")
    axis.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.5, 1.35), frameon=False)
    figure.suptitle(title, y=1.2)
    return _save(figure, path)
