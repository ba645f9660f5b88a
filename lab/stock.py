"""Which ``Llama`` a process runs: ours, or stock's on the libraries of ``make stock``.

One process loads one set of libraries, so comparisons run each side in a process of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STOCK_LIB = Path(os.environ.get("EXPERT_PACK_STOCK_LIB") or ROOT / "build" / "stock" / "bin")


def environment(stock: bool) -> dict[str, str]:
    """Environment variables for a process that runs stock, or ours. Raises FileNotFoundError if stock is not built."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    variables.pop("LLAMA_CPP_LIB_PATH", None)
    if stock:
        if not (STOCK_LIB / "libllama.so").exists():
            raise FileNotFoundError(f"{STOCK_LIB}: stock llama.cpp is not built: run `make stock`")
        variables["LLAMA_CPP_LIB_PATH"] = str(STOCK_LIB)
    return variables


def llama_class(stock: bool, repack: bool = False) -> Any:
    """The class to load models with in this process. Stock's runs with --no-repack, as ours does with a pack."""
    if not stock:
        from llama_expert_pack import Llama

        return Llama

    import llama_cpp

    if repack:
        return llama_cpp.Llama

    class NoRepack(llama_cpp.Llama):  # type: ignore[name-defined, misc, unused-ignore]
        """The constructor has no keyword for it."""

        @property
        def model_params(self) -> Any:
            return self._model_params

        @model_params.setter
        def model_params(self, params: Any) -> None:
            params.use_extra_bufts = False
            self._model_params = params

    return NoRepack
