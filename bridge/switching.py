"""How often Python's threads take turns while a provider runs."""

from __future__ import annotations

import os
import sys
import threading

_lock = threading.Lock()
_n_providers = 0
_usual_interval_s = 0.0


def switch_often(on: bool) -> None:
    """While a provider runs, threads that compute in Python give way to callbacks after 0.1 ms instead of 5."""
    global _n_providers, _usual_interval_s
    with _lock:
        if on and _n_providers == 0:
            _usual_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual_interval_s, 1e-4))
        _n_providers += 1 if on else -1
        if _n_providers == 0:
            sys.setswitchinterval(_usual_interval_s)


def _forget() -> None:
    """In a forked child: the parent's providers do not run here."""
    global _lock, _n_providers
    _lock = threading.Lock()
    if _n_providers > 0:
        sys.setswitchinterval(_usual_interval_s)
    _n_providers = 0


os.register_at_fork(after_in_child=_forget)
