"""The three ways to run a model: stock's server, ours without a pack, ours from a pack."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lab.stock import STOCK_LIB, environment

STOCK_SERVER = STOCK_LIB / "llama-server"
KINDS = ("stock", "ours", "packed")
OUR_SERVER = (sys.executable, "-m", "llama_expert_pack.bridge.server")


def server_command(kind: str) -> list[str]:
    """What starts the server of a kind, without arguments. FileNotFoundError if stock's is not built."""
    if kind != "stock":
        return list(OUR_SERVER)
    if not STOCK_SERVER.exists():
        raise FileNotFoundError(f"{STOCK_SERVER}: stock's llama-server is not built: run `make stock`")
    return [str(STOCK_SERVER)]


def server_environment(kind: str) -> dict[str, str]:
    """Environment of a server. Ours finds this clone's modules from any working directory."""
    return {**os.environ} if kind == "stock" else environment(stock=False)


def write_script(folder: Path, kind: str, pack_variables: dict[str, str], without_pack: str) -> Path:
    """An executable file that starts the server of a kind with any arguments; its path.

    `packed` runs with `pack_variables` set, unless an argument contains `without_pack`: a model without experts.
    """
    lines = ["#!/bin/sh"]
    if kind != "stock":
        lines.append(f"export PYTHONPATH='{server_environment(kind)['PYTHONPATH']}'")
    if kind == "packed":
        settings = " ".join(f"{name}='{value}'" for name, value in pack_variables.items())
        lines.append(f'case "$*" in *{without_pack}*) ;; *) export {settings} ;; esac')
    command = " ".join(f"'{part}'" for part in server_command(kind))
    lines.append(f'exec {command} "$@"')
    path = folder / f"llama-server-{kind}"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path
