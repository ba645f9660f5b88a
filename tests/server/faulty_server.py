"""llama-server with a disk that breaks on command: python -m tests.server.faulty_server FAULT_FILE [arguments].

FAULT_FILE says what reads do from now on: "" or no file: read; "fail": EIO; "slow N": wait N seconds first.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

from bridge.provider import Provider
from bridge.server import main
from tests.server.faults import waiting_file

fault_file = Path(sys.argv.pop(1))


whole_pread = Provider._pread


def pread(provider: Provider, fd: int, buffer: memoryview, offset: int) -> int:
    fault = fault_file.read_text().split() if fault_file.exists() else []
    if fault[:1] == ["fail"]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    if fault[:1] == ["slow"]:
        waiting_file(fault_file).touch()
        time.sleep(float(fault[1]))
    return whole_pread(provider, fd, buffer, offset)


Provider._pread = pread  # type: ignore[method-assign]
sys.exit(main())
