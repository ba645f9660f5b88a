"""Flags and their environment variables, help, contradictions."""

from __future__ import annotations

import inspect
import os
import re
import shutil
from pathlib import Path

import pytest

from llama_expert_pack import Llama
from llama_expert_pack.pypack.values.flags import with_flags
from llama_expert_pack.pypack.values.options import OPTIONS
from tests.server.serving import SMALL, faulty, launch, run_to_end, serving

FLAGS = [option.flag.removeprefix("--expert-") for option in OPTIONS.values()]
USED = "qwen3moe.expert_used_count"


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


@pytest.mark.parametrize("flags", [["--cpu-moe"], ["--n-cpu-moe", "2"], ["-ot", "exps=CPU"]], ids=" ".join)
def test_experts_on_the_cpu(flags: list[str], tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model, *flags, "--expert-pack", "auto", "--expert-ram", "1MiB", "--metrics") as server:
        assert 0 < server.get("/props")["expert_pack"]["cache_bytes"]["CPU"] <= 1 << 20
        packed = server.text("hello")
        assert server.counter("misses_total") > 0
    with serving(tmp_path, model, *flags, "--expert-pack", "none", "--no-repack") as server:
        assert server.text("hello") == packed


@pytest.mark.parametrize(
    ("flags", "n_ubatch"), [([], 1024), (["-ub", "200"], 200), (["--batch-size", "2048"], 512)], ids=["none", "ub", "b"]
)
def test_batches_are_chosen_unless_they_are_given(
    flags: list[str], n_ubatch: int, tmp_path: Path, model: Path, quarter: list[str]
) -> None:
    with serving(tmp_path, model, *quarter, *flags, "--metrics") as server:
        assert server.get("/props")["expert_pack"]["n_ubatch"] == n_ubatch
        assert f"prompts in batches of {n_ubatch} tokens" in server.log
        before = server.counter("lookups_total")
        status, answer = server.complete("word " * 400, 1)
        n_batches = -(-answer["timings"]["prompt_n"] // n_ubatch)
        assert status == 200 and n_batches == (3 if n_ubatch == 200 else 1)
        # one for each of four layers and batch, but the last layer of those whose outputs nobody wants
        assert server.counter("lookups_total") - before == 4 * n_batches - (n_batches - 1)


def test_without_a_pack_it_is_stock(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model, "--expert-pack", "none", "--expert-cache", "1MiB", "--metrics") as server:
        assert "expert_pack" not in server.get("/props")
        assert "expert" not in server.get("/metrics")
        server.text("hello")
        assert "--expert-cache would have no effect without an expert pack" in server.log  # a warning


REFUSED = [
    (["-ot", r"blk\.2\.ffn_up_exps=CPU"], "places some of the expert weights of layer 2 on the CPU and leaves others"),
    (["--split-mode", "row"], "drop --split-mode, or drop --expert-pack"),
    (["--expert-cache", "much"], "--expert-cache must be a size"),
    (["--expert-cache", ""], "--expert-cache must be a size"),
    (["--expert-cache", "9" * 5000], "--expert-cache is '9999"),
    (["--expert-cache", "1KiB"], "--expert-cache comes to 1 KiB"),
    (["--expert-cache", "4KiB"], "the expert cache on CPU is too small"),
    (["--expert-cache-reserve", "900TiB"], "--expert-cache-reserve keeps 900 TiB of that"),
    (["--expert-cache-reserve", "some"], "--expert-cache-reserve must be a size"),
    (["--expert-pack", "missing.expert-pack"], "missing.expert-pack"),
    (["--expert-pack", ""], "--expert-pack must be the path of a file, not ''"),
    (["--expert-trace", ""], "--expert-trace must be the path of a file, not ''"),
    (["--expert-stats-file", ""], "--expert-stats-file must be the path of a file, not ''"),
    (["--expert-policy", ""], "there is no cache policy ''"),
    (["--expert-stats-file", "/nowhere/stats.json"], "/nowhere/stats.json: the statistics file cannot be written"),
    (["--expert-trace", "/nowhere/x.trace"], "/nowhere/x.trace: the expert trace can't be written: No such file"),
    (["--expert-trace", "{fifo}"], "fifo: the expert trace can't be written: it is a FIFO, not a regular file"),
    (["--expert-trace", "{tmp}/x", "--expert-stats-file", "{tmp}/x"], "is the same file as --expert-trace"),
    (["--expert-trace", "{model}"], "a.gguf: --expert-trace is the same file as the model"),
    (
        ["--expert-stats-file", "{link}"],
        "link: --expert-stats-file is the same file as the pack: give it a file of its own",
    ),
    (["--expert-stats-interval", "5"], "--expert-stats-interval would have no effect without --expert-stats-file"),
    (["--expert-pack", "."], ". is a folder: give the path of an .expert-pack file"),
    (["--expert-verify", "maybe"], "--expert-verify must be one of first, off, every, not 'maybe'"),
    (["--expert-policy", "fifo"], "there is no cache policy 'fifo': choose one of"),
    (["--expert-stage-slots", "0"], "--expert-stage-slots must be a whole number from 1 to 1024, not 0"),
    (["--expert-stage-slots", "x"], "--expert-stage-slots must be a whole number from 1 to 1024, not 'x'"),
    (
        ["--expert-stage-slots", "12 or so"],
        "--expert-stage-slots must be a whole number from 1 to 1024, not '12 or so'",
    ),
    (["--expert-stage-slots", "2147483648"], "--expert-stage-slots must be a whole number from 1 to 1024"),
    (["--expert-read-splits", "9" * 5000], "--expert-read-splits must be a whole number from 1 to 1024, not '9999"),
    (["--expert-read-splits", ""], "--expert-read-splits must be a whole number from 1 to 1024, not ''"),
    (["--override-kv", f"{USED}=int:{2**40}"], f"the override of {USED} must be a whole number from 1 to 16"),
    (["--override-kv", f"{USED}=int:0"], f"the override of {USED} must be a whole number from 1 to 16, not 0"),
    (
        ["--expert-stats-file", "{tmp}/stats.json", "--expert-stats-interval", "-1"],
        "a number of seconds above 0, not -1",
    ),
    (
        ["--expert-stats-file", "{tmp}/stats.json", "--expert-stats-interval", "1m"],
        "--expert-stats-interval must be a number of seconds above 0, not '1m'",
    ),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=[" ".join(flags)[:60] for flags, _ in REFUSED])
def test_refused_with_a_sentence(tmp_path: Path, model: Path, flags: list[str], message: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(model.with_suffix(".expert-pack"))
    places = {"tmp": tmp_path, "fifo": tmp_path / "fifo", "model": model, "link": tmp_path / "link"}
    flags = [re.sub(r"{(\w+)}", lambda match: str(places[match[1]]), flag) for flag in flags]
    run = run_to_end(["-m", str(model), "--expert-pack", "auto", "--port", "0", *SMALL, *flags])
    assert run.returncode == 1
    said = next(line for line in (run.stdout + run.stderr).splitlines() if message in line)
    assert not re.search(r"\bexpert_[a-z]", said.replace("expert_used_count", ""))
    assert "Traceback" not in run.stderr


def test_messages_name_flags_where_python_names_keywords() -> None:
    keywords = {name for name in inspect.signature(Llama.__init__).parameters if name.startswith("expert_")}
    assert {with_flags(f"lower {keyword}") for keyword in keywords} == {f"lower --expert-{flag}" for flag in FLAGS}
    for message, said in {
        "or turn direct I/O off with expert_direct_io=False": "or turn direct I/O off with --no-expert-direct-io",
        "raise expert_cache or lower expert_cache_reserve:": "raise --expert-cache or lower --expert-cache-reserve:",
        "expert_cache, expert_trace.": "--expert-cache, --expert-trace.",
        "/expert_cache/a expert_pack.gguf my_expert_cache expert_cacher expert_trace/b": "",
    }.items():
        assert with_flags(message) == (said or message)


def test_no_direct_io_names_the_flag(tmp_path: Path, model: Path) -> None:
    """The trial read at the start fails as on a file system without O_DIRECT."""
    fault = tmp_path / "fault"
    fault.write_text("no-direct-io")
    server = launch(tmp_path, ["-m", str(model), "--expert-pack", "auto", *SMALL], faulty(fault))
    assert server.process.wait(60) == 1
    assert "turn direct I/O off with --no-expert-direct-io" in server.log


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        *[([f"--expert-{flag}", "x"], f"--expert-{flag}") for flag in FLAGS if flag not in ("pack", "direct-io")],
        (["--no-expert-direct-io"], "--no-expert-direct-io"),
        (["--expert-trace", "x", "--expert-cache", "1GiB"], "--expert-cache, --expert-trace"),
    ],
)
def test_flags_without_a_pack_are_refused(model: Path, flags: list[str], names: str) -> None:
    run = run_to_end(["-m", str(model), "--port", "0", *SMALL, *flags])
    assert run.returncode == 1
    assert f"{names} would have no effect without an expert pack: add --expert-pack auto" in run.stdout + run.stderr


def test_variables_without_a_pack_are_refused(model: Path) -> None:
    def refused(**variables: str) -> str:
        run = run_to_end(["-m", str(model), "--port", "0", *SMALL], variables)
        assert run.returncode == 1
        return run.stdout + run.stderr

    assert "--expert-cache would have no effect without an expert pack" in refused(LLAMA_ARG_EXPERT_CACHE="1GiB")
    assert "--expert-pack must be the path of a file, not ''" in refused(LLAMA_ARG_EXPERT_PACK="")


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


def test_a_pack_whose_name_is_no_text(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    for suffix in (".expert-pack", ".expert-pack.manifest.json"):
        shutil.copy(model.with_suffix(suffix), folder)
    with serving(tmp_path, model, *quarter, "--expert-pack", str(folder / "a.expert-pack")) as server:
        assert server.get("/props")["expert_pack"]["path"] == f"{tmp_path}/\\xff/a.expert-pack"
        server.text("hello")


def test_other_overrides_are_allowed(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    other = "other.expert_used_count=int:1000"
    with serving(tmp_path, model, *quarter, "-ot", "attn_q=CPU", "--override-kv", other) as server:
        server.text("hello")
