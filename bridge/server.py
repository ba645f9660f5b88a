"""``llama-server``: upstream's server, in this process, with the routed experts of its model from a pack.

All arguments go to llama.cpp's own parser, which knows ours too (native/src/server/expert_args.cpp).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from ..pypack.errors import NativeError
from . import library, openmp


def main() -> int:
    """Runs llama-server with this process's arguments and returns its exit status."""
    try:
        with openmp.short_spin() if _has_pack() else contextlib.nullcontext():
            library.check_native()
            run = _native_main()
    except NativeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _give_signals_back()
    return run([os.fsencode(argument) for argument in sys.argv], os.fsencode(_executable()))


def _native_main() -> Callable[[list[bytes], bytes], int]:
    try:
        from .server_session import run
    except ImportError as error:
        raise NativeError(f"the server's library can't be loaded ({error}): {library.REBUILD}") from error
    return run


def _has_pack() -> bool:
    return "LLAMA_ARG_EXPERT_PACK" in os.environ or any(arg.startswith("--expert-pack") for arg in sys.argv)


def _give_signals_back() -> None:
    """Python handles a signal when its interpreter runs next, which is never while the server does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # until upstream sets its own


def _executable() -> str:
    """What a router starts for each of its models."""
    command = shutil.which(sys.argv[0])
    if command is not None and not command.endswith(".py"):
        return str(Path(command).absolute())
    os.environ["LLAMA_APP_CMD"] = "-mllama_expert_pack.bridge.server"  # upstream puts it behind the executable's name
    return sys.executable


if __name__ == "__main__":
    sys.exit(main())
