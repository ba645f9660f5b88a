"""What the conversion tests convert, and what is left of it."""

from __future__ import annotations

from pathlib import Path

from llama_expert_pack.pypack.convert.convert import Conversion, convert
from tests.gguf_bytes import GGUF, facts, moe_tensors
from tests.pack_tools import manifest_of


def mixed() -> GGUF:
    """Blocks of four sizes, from one page to over 1 MiB."""
    return GGUF(
        facts(),
        [
            *moe_tensors(0, n_expert=40, n_embd=32, n_ff=8, types=(24, 24, 24)),
            *moe_tensors(1, n_expert=5, n_embd=512, n_ff=256),
            *moe_tensors(3, n_expert=7, n_embd=96, n_ff=160, types=(2, 8, 1)),
            *moe_tensors(4, n_expert=3, n_embd=256, n_ff=512, types=(12, 14, 10)),
        ],
    )


def run(model: Path, **options: object) -> Conversion:
    return convert(model, safety_margin_bytes=0, **options)  # type: ignore[arg-type]


def files_of(pack: Path) -> tuple[bytes, bytes]:
    return pack.read_bytes(), manifest_of(pack).read_bytes()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


FINISHED = {"model.gguf", "model.expert-pack", "model.expert-pack.manifest.json"}
