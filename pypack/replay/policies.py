"""The policies that a replay knows: the live cache's, those that were the best on no trace at no size, and the bounds."""

from __future__ import annotations

from ..policy import POLICIES
from ..policy.base import Policy
from .arc import Arc
from .belady import Belady, BeladyBypass
from .slru import Slru
from .static_hot import StaticHot

REPLAY_POLICIES: dict[str, type[Policy]] = {**POLICIES, "arc": Arc, "slru": Slru, "static-hot": StaticHot}

BYPASS = "belady-bypass"  # what the others are compared with
BOUNDS: dict[str, type[Policy]] = {"belady": Belady, BYPASS: BeladyBypass}
WITH_BOUNDS = REPLAY_POLICIES | BOUNDS
