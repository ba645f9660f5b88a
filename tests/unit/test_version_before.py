"""What version 0.1.0 wrote opens as it did then: tests/unit/golden/0.1.0 holds a pack and a run's trace of commit 5a239a0.

The next version adds its own folder when it changes a format; these stay.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import xxhash

from lab.synth.model import write_model
from lab.variants import SHAPES
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.replay.as_recorded import check_live
from llama_expert_pack.pypack.trace.format import Kind
from llama_expert_pack.pypack.trace.trace import read_trace
from tests.pack_tools import manifest_of

BEFORE = Path(__file__).parent / "golden" / "0.1.0"
# two kinds of experts in each layer, another type in the second one; a block is one page
SHAPE = replace(
    SHAPES["two-groups"],
    n_layer=2,
    n_embd=32,
    n_head=1,
    n_ff=32,
    n_ff_exp=32,
    n_expert=4,
    expert_types={role: ("Q4_0", "IQ4_NL") for role in ("gate", "up", "down")},
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model of the pack: the same bytes at any time."""
    return write_model(tmp_path / "small.gguf", SHAPE)


def test_the_pack_opens_and_every_block_is_what_it_was(model: Path) -> None:
    pack = open_pack(BEFORE / "small.expert-pack")
    assert pack.manifest.builder == "llama-expert-pack 0.1.0"
    assert [(layer.block, layer.group, layer.n_expert, layer.block_bytes) for layer in pack.layers] == [
        (0, "exps", 4, 4096), (0, "chexps", 2, 4096), (1, "exps", 4, 4096), (1, "chexps", 2, 4096),
    ]  # fmt: skip
    for layer in pack.layers:
        for expert in range(layer.n_expert):
            place = int(pack.index[layer.first_key + expert]["offset"])
            data = np.fromfile(pack.path, np.uint8, layer.block_bytes, offset=place)
            assert xxhash.xxh3_128_digest(data.tobytes()) == pack.digest(layer.index, expert)
    assert verify(pack.path, deep=True, source=model).source_checked


def test_a_conversion_takes_the_pack_for_finished(model: Path) -> None:
    for name in ("small.expert-pack", "small.expert-pack.manifest.json"):
        shutil.copy(BEFORE / name, model.parent)
    result = convert(model, safety_margin_bytes=0)
    assert (result.reused, result.resumed_layers, result.leftover) == (True, 0, None)


def test_a_conversion_today_gives_the_same_bytes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the builder's name, too, which is all that may differ in another version."""
    builder = open_pack(BEFORE / "small.expert-pack").manifest.builder
    monkeypatch.setattr(import_module("llama_expert_pack.pypack.convert.convert"), "BUILDER", builder)
    pack = convert(model, safety_margin_bytes=0).path
    assert pack.read_bytes() == (BEFORE / pack.name).read_bytes()
    assert manifest_of(pack).read_bytes() == manifest_of(BEFORE / pack.name).read_bytes()


def test_the_trace_reads_and_replays_with_the_counters_of_its_run() -> None:
    """A cache of three slots, prompts larger than that, and a read that failed."""
    trace = read_trace(BEFORE / "small.trace")
    assert (trace.policy, trace.top_k, trace.n_keys) == ("by-budget", 2, 12)
    assert {Kind(kind) for kind in trace.kind.tolist()} == {*Kind} - {Kind.END, Kind.AHEAD}
    assert trace.end == (69, 7, 125, 124, 1)
    assert check_live(trace).endswith("the run's counters: 7 hits, 125 misses, 124 evictions")
