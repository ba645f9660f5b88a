"""Run mixture-of-experts GGUF models that are larger than VRAM and RAM, from an expert pack on an SSD.

>>> from llama_expert_pack import Llama
>>> llm = Llama("model.gguf", expert_pack=True, expert_cache="20GiB")
"""

from bridge.llama import Llama
from pypack.counters import ExpertStats
from pypack.errors import DecodeError, ExpertPackError

__all__ = ["DecodeError", "ExpertPackError", "ExpertStats", "Llama"]
