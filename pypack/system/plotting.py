"""matplotlib, which is optional."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError


def pyplot(backend: str, what: str) -> Any:
    """``matplotlib.pyplot``. Raises :class:`UsageError` if it is not installed: then ``what`` can't be drawn."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(f"matplotlib draws {what} and is not installed: pip install matplotlib") from error
    matplotlib.use(backend)
    from matplotlib import pyplot

    return pyplot
