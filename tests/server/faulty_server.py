"""llama-server with a disk that breaks on command: python -m tests.server.faulty_server FAULT_FILE [arguments].

FAULT_FILE says what reads do from now on: "" or no file: read; "fail": EIO; "slow N": wait N seconds first. "open N":
the opening of the pack waits; "no-direct-io" at the start: files can't be opened with O_DIRECT.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llama_expert_pack.bridge.provider
import llama_expert_pack.bridge.server_session
import llama_expert_pack.pypack.drive.direct_io
from llama_expert_pack.bridge.model_pack import open_checked as usual_open
from llama_expert_pack.bridge.native_tables import describe_blocks
from llama_expert_pack.bridge.server import main
from llama_expert_pack.pypack.drive.direct_io import pread_into
from llama_expert_pack.pypack.drive.reader import Reader
from llama_expert_pack.pypack.errors import ReadError
from llama_expert_pack.pypack.format.pack import Pack
from llama_expert_pack.pypack.values.options import Verify
from tests.server.faults import waiting_file

fault_file = Path(sys.argv.pop(1))


provider: Any = llama_expert_pack.bridge.provider
session: Any = llama_expert_pack.bridge.server_session


def pread(fd: int, buffer: memoryview, offset: int) -> int:
    fault = fault_file.read_text().split() if fault_file.exists() else []
    if fault[:1] == ["fail"]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    if fault[:1] == ["slow"]:
        waiting_file(fault_file).touch()
        time.sleep(float(fault[1]))
    return pread_into(fd, buffer, offset)


def open_checked(*arguments: Any) -> Pack:
    fault = fault_file.read_text().split() if fault_file.exists() else []
    if fault[:1] == ["open"]:
        waiting_file(fault_file).touch()
        time.sleep(float(fault[1]))
    return usual_open(*arguments)


def only_the_provider(pack: Pack, fd: int, verify: Verify) -> NDArray[np.void]:
    return describe_blocks(pack, -1, verify)


def open_directly(path: Path, flags: int) -> int:
    if flags & os.O_DIRECT and fault_file.exists() and fault_file.read_text() == "no-direct-io":
        raise ReadError(f"{path}: cannot be opened", errno.EINVAL)
    return open_usually(path, flags)


open_usually = llama_expert_pack.pypack.drive.direct_io._open
llama_expert_pack.pypack.drive.direct_io._open = open_directly
provider.Reader = partial(Reader, pread=pread)
provider.describe_blocks = only_the_provider
session.open_checked = open_checked
sys.exit(main())
