"""Hit rate over budget, and how far each policy is from the best possible."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

__all__ = ["draw_hit_rates"]

SHOWN = ("freq-age", "freq-recency", "lru", "s3-fifo", "belady", "belady-bypass")  # beside the default


def draw_hit_rates(rows: Sequence[dict[str, Any]], *, default: str) -> bytes:
    """An SVG of one trace's rows, as bench.replay makes them: the default policy, which stands out, and SHOWN."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "llama-expert-pack"  # the same picture gives the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, (rates, gaps) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    best = {row["budget"]: row["hit_rate"] for row in rows if row["policy"] == "belady-bypass"}
    for policy in (policy for policy in (default, *SHOWN) if any(row["policy"] == policy for row in rows)):
        mine = [row for row in rows if row["policy"] == policy]
        shares = [100 * row["share"] for row in mine]
        is_bound = policy.startswith("belady")
        style: dict[str, Any] = {"color": "black", "linestyle": "--" if policy == "belady" else ":"} if is_bound else {}
        style["linewidth"] = 2.5 if policy == default else 1.2
        note = " (default)" if policy == default else ""
        rates.plot(shares, [100 * row["hit_rate"] for row in mine], label=policy + note, **style)
        if not is_bound:
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
    pyplot.close(figure)
    return picture.getvalue()
