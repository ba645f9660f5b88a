"""The speed benchmark's two models in turn, here on the CPU: same tokens, same logits, nothing read while it counts."""

from __future__ import annotations

from pathlib import Path

from bench.gpu.speed import in_process
from lab.variants import VARIANTS
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack


def test_a_model_without_and_with_its_pack_in_turn(tmp_path: Path) -> None:
    path = VARIANTS["type-Q8_0"](tmp_path)
    convert(path)
    pack = open_pack(find_pack(path))
    packed = {"expert_pack": True, "expert_cache": pack.payload_bytes}
    job = {"model": str(path), "stock": False, "options": packed, "n_ctx": 128, "n_ubatch": 64}
    found = in_process({**job, "prompts": [32, 64], "n_steps": 4, "n_repeats": 3}, "measure_in_turn")
    assert "error" not in found, found
    assert found["same_logits"] and found["loads"] == 0
    for phase in ("prefill32", "step_after32", "prefill64", "step_after64"):
        times = found[f"{phase}_us"]
        assert times["no-pack"] > 0 and times["packed"] > 0
        assert found[f"{phase}_ratio"] == times["no-pack"] / times["packed"]


def test_one_side_says_what_its_cache_did(tmp_path: Path) -> None:
    path = VARIANTS["many-experts"](tmp_path)
    convert(path)
    job = {
        "model": str(path),
        "n_ctx": 128,
        "n_ubatch": 64,
        "prompts": [32],
        "n_steps": 4,
        "n_repeats": 1,
        "n_warm_up": 0,
    }
    stock = in_process({**job, "stock": True, "options": {}})
    ours = in_process({**job, "stock": False, "options": {"expert_pack": True}})
    assert "error" not in ours, ours
    assert ours["logits_digests"] == stock["logits_digests"]
    assert ours["expert_stats"]["loads"] > 0 and ours["decode_after32_tokens_per_s"] > 0
