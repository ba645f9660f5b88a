# What cffi makes of native/include/expert_server.h.
from typing import Any

ffi: Any
lib: Any
