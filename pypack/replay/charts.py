"""Hit rate over budget, and how far each policy is from the best possible."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ..policy import DEFAULT_POLICY
from ..system.plotting import pyplot
from .policies import BOUNDS, BYPASS
from .rows import Row

SHOWN = (DEFAULT_POLICY, "freq-age", "freq-recency", "lru", "s3-fifo", *BOUNDS)


def draw_hit_rates(rows: Sequence[Row]) -> bytes:
    """An SVG of one trace's rows: the policies of SHOWN, of which the default stands out.

    Raises :class:`UsageError` if matplotlib is missing.
    """
    plot = pyplot("svg", "the charts")
    # the same picture gives the same file
    with plot.rc_context({"svg.hashsalt": "llama-expert-pack", "svg.fonttype": "none"}):
        figure, (rates, gaps) = plot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        best = {row["budget"]: row["hit_rate"] for row in rows if row["policy"] == BYPASS}
        for policy in (policy for policy in SHOWN if any(row["policy"] == policy for row in rows)):
            mine = [row for row in rows if row["policy"] == policy]
            shares = [100 * row["share"] for row in mine]
            style = _style(policy)
            note = " (default)" if policy == DEFAULT_POLICY else ""
            rates.plot(shares, [100 * row["hit_rate"] for row in mine], label=policy + note, **style)
            if policy not in BOUNDS:
                gap = [100 * (best[row["budget"]] - row["hit_rate"]) for row in mine]
                gaps.plot(shares, gap, color=rates.lines[-1].get_color(), linewidth=style["linewidth"])
        for axes, title in ((rates, "hit rate, %"), (gaps, "below Belady with bypass, percentage points")):
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.set_xticks(shares, [f"{share:.3g}" for share in shares])
            axes.set_xlabel("cache, % of all experts")
            axes.set_title(title, fontsize=10)
        figure.legend(*rates.get_legend_handles_labels(), loc="outside right center", fontsize=8)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
        plot.close(figure)
        return picture.getvalue()


def _style(policy: str) -> dict[str, Any]:
    if policy in BOUNDS:
        return {"linewidth": 1.2, "color": "black", "linestyle": ":" if policy == BYPASS else "--"}
    return {"linewidth": 2.5 if policy == DEFAULT_POLICY else 1.2}
