"""Writes the C source of a cffi module (API mode) of the bridge from its header.

Usage: build_provider.py {_provider,_server} HEADER OUT.c
"""

import re
import sys
from pathlib import Path

import cffi

# functions of ours that C calls, by module
CALLBACKS = {
    "_provider": """
extern "Python" int expert_pack_open_arena(void *, const char *, uint64_t, const int32_t *, int32_t);
extern "Python" int expert_pack_choose_slots(void *, int32_t, const int32_t *, int32_t, const int32_t *, int32_t, int32_t, int32_t *);
extern "Python" void expert_pack_prepare(void *, int32_t, const int32_t *, int32_t);
extern "Python" void expert_pack_read(void *, int32_t, int32_t, int32_t);
extern "Python" int expert_pack_may_take(void *, uint64_t);
extern "Python" void expert_pack_plan(void *);
extern "Python" int expert_pack_withdraw(void *, const int32_t *, int32_t);
""",
    "_server": """
extern "Python" int expert_launcher_open_pack(const expert_request *, expert_opened *);
extern "Python" uint64_t expert_launcher_cache_room(uint64_t, double);
extern "Python" uint32_t expert_launcher_choose_batch(const void *, const void *, uint32_t, uint32_t);
extern "Python" int expert_launcher_open_arenas(expert_opened *);
extern "Python" void expert_launcher_close_pack(void);
extern "Python" const char * expert_launcher_why_failed(void);
""",
}


def main(module: str, header: str, out: str) -> None:
    text = Path(header).read_text()
    match = re.search(r"// cffi: begin\n(.*)// cffi: end", text, re.DOTALL)
    if match is None:
        raise SystemExit(f"error: {header}: the cffi marks are missing")
    ffi = cffi.FFI()
    ffi.cdef(match.group(1) + CALLBACKS[module])
    ffi.set_source(f"llama_expert_pack.bridge.{module}", f'#include "{Path(header).name}"')
    ffi.emit_c_code(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
