"""Flags and their environment variables, help, contradictions."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.server.serving import SMALL, run_to_end, serving

FLAGS = (
    "pack", "cache", "cache-reserve", "policy", "stage-slots", "read-splits", "direct-io", "verify", "stats-file",
    "stats-interval", "trace",
)  # fmt: skip


def test_help_has_our_section_in_upstreams_format() -> None:
    run = run_to_end(["--help"])
    assert run.returncode == 0
    upstream, ours = run.stdout.split("----- expert pack params -----")
    assert "--sleep-idle-seconds SECONDS" in upstream and "--expert" not in upstream
    for flag in FLAGS:
        assert f"--expert-{flag}" in ours
        assert f"(env: LLAMA_ARG_EXPERT_{flag.upper().replace('-', '_')})" in ours
    assert "--no-expert-direct-io" in ours


def test_version_and_unknown_flag() -> None:
    assert run_to_end(["--version"]).returncode == 0
    run = run_to_end(["--expert-pak", "auto"])
    assert run.returncode == 1
    assert "invalid argument: --expert-pak" in run.stderr


def test_variables_set_what_flags_set(tmp_path: Path, model: Path) -> None:
    variables = {
        "LLAMA_ARG_EXPERT_PACK": str(model.with_suffix(".expert-pack")),
        "LLAMA_ARG_EXPERT_CACHE": "2MiB",
        "LLAMA_ARG_EXPERT_POLICY": "lru",
        "LLAMA_ARG_EXPERT_VERIFY": "every",
        "LLAMA_ARG_NO_EXPERT_DIRECT_IO": "1",
        "LLAMA_ARG_EXPERT_STATS_FILE": str(tmp_path / "stats.json"),
        "LLAMA_ARG_ENDPOINT_METRICS": "1",
    }
    with serving(tmp_path, model, "--expert-verify", "off", variables=variables) as server:
        pack = server.get("/props")["expert_pack"]
        assert pack["path"] == variables["LLAMA_ARG_EXPERT_PACK"]
        assert pack["policy"] == "lru" and pack["direct_io"] is False
        assert pack["verify"] == "off"  # the command line wins
        assert 0 < pack["cache_bytes"]["CPU"] <= 2 << 20
        assert (pack["n_layers"], pack["n_experts"]) == (4, 64)
        server.text("hello")
        assert server.counter("buffered_reads_total") > 0
    assert '"hits"' in (tmp_path / "stats.json").read_text()


def test_without_a_pack_it_is_stock(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model, "--expert-pack", "none", "--expert-cache", "1MiB", "--metrics") as server:
        assert "expert_pack" not in server.get("/props")
        assert "expert" not in server.get("/metrics")
        server.text("hello")


REFUSED = [
    (["--cpu-moe"], "comes from the expert pack: drop that flag"),
    (["--n-cpu-moe", "1"], "blk.0.ffn_gate_exps.weight, which comes from the expert pack: drop that flag"),
    (["-ot", r"blk\.2\.ffn_up_exps=CPU"], "blk.2.ffn_up_exps.weight, which comes from the expert pack: drop that flag"),
    (["--split-mode", "row"], "drop --split-mode, or drop --expert-pack"),
    (["--expert-cache", "much"], "'much' is not a size"),
    (["--expert-cache", "4KiB"], "the expert cache on CPU is too small"),
    (["--expert-cache-reserve", "900TiB"], "are reserved"),
    (["--expert-pack", "missing.expert-pack"], "missing.expert-pack"),
    (["--expert-stats-file", "/nowhere/stats.json"], "/nowhere/stats.json: the statistics file cannot be written"),
    (["--expert-trace", "/nowhere/x.trace"], "/nowhere/x.trace: the expert trace can't be written: No such file"),
    (["--expert-trace", "{fifo}"], "fifo: the expert trace can't be written: it is a FIFO, not a regular file"),
    (["--expert-trace", ""], "the path is empty: give a file, or leave the option out"),
    (["--expert-stats-file", ""], "the path is empty: give a file, or leave the option out"),
    (["--expert-trace", "{tmp}/x", "--expert-stats-file", "{tmp}/x"], "is the same file as --expert-trace"),
    (["--expert-trace", "{model}"], "a.gguf: --expert-trace is the same file as the model"),
    (
        ["--expert-stats-file", "{link}"],
        "link: --expert-stats-file is the same file as the pack: give it a file of its own",
    ),
    (["--expert-verify", "maybe"], "verify must be one of first, off, every, not 'maybe'"),
    (["--expert-policy", "fifo"], "there is no cache policy 'fifo': choose one of"),
    (["--expert-stage-slots", "0"], "stage_slots must be a whole number of at least 1, not 0"),
    (["--expert-read-splits", "0"], "read_splits must be a whole number of at least 1, not 0"),
    (
        ["--expert-stats-file", "{tmp}/stats.json", "--expert-stats-interval", "-1"],
        "a number of seconds above 0, not -1",
    ),
    (
        ["--expert-stats-file", "{tmp}/stats.json", "--expert-stats-interval", "1m"],
        "a number of seconds above 0, not '1m'",
    ),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=[" ".join(flags) for flags, _ in REFUSED])
def test_refused_with_a_sentence(tmp_path: Path, model: Path, flags: list[str], message: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(model.with_suffix(".expert-pack"))
    places = {"tmp": tmp_path, "fifo": tmp_path / "fifo", "model": model, "link": tmp_path / "link"}
    flags = [re.sub(r"{(\w+)}", lambda match: str(places[match[1]]), flag) for flag in flags]
    run = run_to_end(["-m", str(model), "--expert-pack", "auto", "--port", "0", *SMALL, *flags])
    assert run.returncode == 1
    assert message in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def test_another_models_pack(models: Path) -> None:
    run = run_to_end(
        ["-m", str(models / "a.gguf"), "--expert-pack", str(models / "b.expert-pack"), "--port", "0", *SMALL]
    )
    assert run.returncode == 1
    assert "does not belong to" in run.stdout + run.stderr


def test_no_pack_beside_the_model(models: Path) -> None:
    run = run_to_end(["-m", str(models / "draft.gguf"), "--expert-pack", "auto", "--port", "0", *SMALL])
    assert run.returncode == 1
    assert "make it with `expert-pack convert" in run.stdout + run.stderr


def test_override_of_other_tensors_is_allowed(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    with serving(tmp_path, model, *quarter, "-ot", "attn_q=CPU") as server:
        server.text("hello")
