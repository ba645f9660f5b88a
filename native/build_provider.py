"""Writes the C source of bridge._provider (cffi, API mode) from the provider header.

Usage: build_provider.py HEADER OUT.c
"""

import re
import sys
from pathlib import Path

import cffi

CALLBACKS = """
extern "Python" int expert_pack_open_arena(void *, const char *, uint64_t, const int32_t *, int32_t);
extern "Python" int expert_pack_fetch(void *, int32_t, const int32_t *, int32_t, const int32_t *, int32_t, int32_t *);
"""


def main(header: str, out: str) -> None:
    text = Path(header).read_text()
    match = re.search(r"// cffi: begin\n(.*)// cffi: end", text, re.DOTALL)
    if match is None:
        raise SystemExit(f"error: {header}: the cffi marks are missing")
    ffi = cffi.FFI()
    ffi.cdef(match.group(1) + CALLBACKS)
    ffi.set_source("bridge._provider", '#include "expert_provider.h"')
    ffi.emit_c_code(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
