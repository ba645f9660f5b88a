"""Replays of one trace with many policies at many budgets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..errors import BudgetError
from ..policy import make_policy
from ..trace.trace import Trace
from ..values.sizes import parse_size
from .engine import Acquires, replay
from .policies import WITH_BOUNDS
from .processes import map_in_processes

Row = dict[str, Any]


def replay_all(
    trace: Trace,
    name: str,
    group: str,
    policies: Sequence[str],
    budgets: Sequence[str],
    n_processes: int = 1,
    *,
    ram: str = "0",
) -> list[Row]:
    """A row for each policy and each budget that holds a working set, in this order. ``ram``: host memory beside it.

    Raises :class:`ExpertPackError`.
    """
    acquires = Acquires(trace)
    host_bytes = parse_size(ram, trace.payload_bytes)
    n_per_token = sum(min(trace.top_k, layer.n_expert) for layer in trace.layers)
    n_experts = sum(layer.n_expert for layer in trace.layers)

    def row(job: tuple[str, str]) -> Row | None:
        policy, budget = job
        budget_bytes = parse_size(budget, trace.payload_bytes)
        start = time.process_time()
        try:
            counts = replay(acquires, trace.pools(budget_bytes, host_bytes), make_policy(policy, WITH_BOUNDS))
        except BudgetError:
            return None
        share = min(1.0, (budget_bytes + host_bytes) / trace.payload_bytes)
        return {
            "trace": name, "group": group, "policy": policy, "budget": budget, "host_bytes": host_bytes, "share": share,
            "holds_tokens": share * n_experts / n_per_token, "acquires": counts.acquires, "hits": counts.hits,
            "misses": counts.misses, "evictions": counts.evictions, "hit_rate": counts.hit_rate,
            "decode_hit_rate": counts.decode_hit_rate,
            "host_hits": counts.host_hits, "host_hit_rate": counts.host_hits / max(1, counts.hits + counts.misses),
            "cpu_s": time.process_time() - start,
        }  # fmt: skip

    jobs = [(policy, budget) for policy in policies for budget in budgets]
    return [found for found in map_in_processes(row, jobs, n_processes) if found is not None]
