"""llama-server with a disk that breaks on command: python -m tests.server.faulty_server FAULT_FILE [arguments].

FAULT_FILE says what reads do from now on: "" or no file: read; "fail": EIO; "slow N": wait N seconds first.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

from bridge.server import main
from pypack.direct_io import pread_into
from pypack.reader import Reader
from tests.server.faults import waiting_file

fault_file = Path(sys.argv.pop(1))


def pread(fd: int, buffer: memoryview, offset: int) -> int:
    fault = fault_file.read_text().split() if fault_file.exists() else []
    if fault[:1] == ["fail"]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    if fault[:1] == ["slow"]:
        waiting_file(fault_file).touch()
        time.sleep(float(fault[1]))
    return pread_into(fd, buffer, offset)


defaults = Reader.__init__.__kwdefaults__
assert defaults is not None and "pread" in defaults
defaults["pread"] = pread
sys.exit(main())
