# What cffi makes of native/include/expert_provider.h.
from typing import Any

ffi: Any
lib: Any
