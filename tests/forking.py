"""Children of the process that runs a test."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable


def status_of_child(body: Callable[[], object]) -> int:
    """0 if the child did all of ``body``, 1 with a traceback if that raised, -14 if it hung."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
