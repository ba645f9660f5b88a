"""The cache policies by name. docs/POLICY.md compares them on recorded traces."""

from __future__ import annotations

from ..errors import UsageError
from ..values.checks import shown
from ..values.options import OPTIONS
from .admission import ByBudget, TinyLfu
from .base import Policy
from .queues import Arc, S3Fifo, Slru
from .scores import AgedLfu, FreqAge, FreqThenRecency, Lru, StaticHot

__all__ = ["DEFAULT_POLICY", "POLICIES", "Policy", "make_policy"]

POLICIES: dict[str, type[Policy]] = {
    "aged-lfu": AgedLfu,
    "arc": Arc,
    "by-budget": ByBudget,
    "freq-age": FreqAge,
    "freq-recency": FreqThenRecency,
    "lru": Lru,
    "s3-fifo": S3Fifo,
    "slru": Slru,
    "static-hot": StaticHot,
    "tiny-lfu": TinyLfu,
}
DEFAULT_POLICY: str = OPTIONS["expert_policy"].default


def make_policy(name: str) -> Policy:
    """The policy of that name; :class:`UsageError` lists the names if there is none."""
    if not isinstance(name, str) or name not in POLICIES:
        raise UsageError(f"there is no cache policy {shown(name)}: choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
