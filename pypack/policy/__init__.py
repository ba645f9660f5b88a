"""Cache policies: which experts leave when others must come in. One a file, with its rule at the top.

docs/POLICY.md compares them on recorded traces. Those that were never the best there live with the replay.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import UsageError
from ..values.checks import shown
from ..values.options import OPTIONS
from .adaptive import Adaptive
from .aged_lfu import AgedLfu
from .base import Policy
from .by_budget import ByBudget
from .freq_age import FreqAge
from .freq_recency import FreqThenRecency
from .lru import Lru
from .s3_fifo import S3Fifo
from .tiny_lfu import TinyLfu

DEFAULT_POLICY: str = OPTIONS["expert_policy"].default

POLICIES: dict[str, type[Policy]] = {
    "adaptive": Adaptive,
    "aged-lfu": AgedLfu,
    "by-budget": ByBudget,
    "freq-age": FreqAge,
    "freq-recency": FreqThenRecency,
    "lru": Lru,
    "s3-fifo": S3Fifo,
    "tiny-lfu": TinyLfu,
}


def make_policy(name: str, policies: Mapping[str, type[Policy]] = POLICIES) -> Policy:
    """The policy of that name; :class:`UsageError` lists the names if there is none."""
    if not isinstance(name, str) or name not in policies:
        raise UsageError(f"there is no cache policy {shown(name)}: choose one of {', '.join(sorted(policies))}")
    return policies[name]()
