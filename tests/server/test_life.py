"""Ends, sleep, several models."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.policy import POLICIES
from llama_expert_pack.pypack.replay.as_recorded import replay_as_recorded
from llama_expert_pack.pypack.trace.trace import read_trace
from tests.runtime.test_bytes import expert_ranges
from tests.server.faults import waiting_file
from tests.server.serving import OURS, SMALL, Server, faulty, launch, serving, wait_for

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])


def end(server: Server, number: int) -> int:
    try:
        return server.stop(number)
    finally:
        server.process.kill()


@SIGNALS
def test_signal_while_loading(tmp_path: Path, number: int) -> None:
    """The model's file is a pipe that nobody writes to: the load never ends by itself."""
    fifo = tmp_path / "model.gguf"
    os.mkfifo(fifo)
    server = launch(tmp_path, ["-m", str(fifo), *SMALL])
    wait_for(lambda: "loading model" in server.log or server.process.poll() is not None)
    assert server.process.poll() is None, server.log
    assert end(server, number) == -number  # as stock, which has no handler yet


@SIGNALS
def test_signal_during_the_first_read(tmp_path: Path, model: Path, quarter: list[str], number: int) -> None:
    fault = tmp_path / "fault"
    fault.write_text("slow 1000")
    server = launch(tmp_path, ["-m", str(model), *SMALL, *quarter], faulty(fault))
    wait_for(lambda: waiting_file(fault).exists() or server.process.poll() is not None)
    assert server.process.poll() is None, server.log
    assert end(server, number) == -number


@SIGNALS
def test_signal_during_a_read(tmp_path: Path, model: Path, quarter: list[str], number: int) -> None:
    """A prompt in 32 batches that each need all experts: with such a disk it would take half an hour."""
    fault = tmp_path / "fault"
    server = launch(tmp_path, ["-m", str(model), *SMALL, *quarter, "--metrics", "-ub", "16"], faulty(fault))
    server.wait_ready()
    fault.write_text("slow 2")
    prefill = threading.Thread(target=lambda: server.complete("word " * 400, 8))
    before = server.counter("misses_total")
    prefill.start()
    wait_for(lambda: server.counter("misses_total") > before)
    assert end(server, number) == 0
    prefill.join()


@SIGNALS
def test_signal_during_decode(tmp_path: Path, model: Path, quarter: list[str], number: int) -> None:
    server = launch(tmp_path, ["-m", str(model), *SMALL, *quarter, "--metrics", "-c", "8192"])
    server.wait_ready()
    decode = threading.Thread(target=lambda: server.complete("hello", 4000))
    decode.start()
    before = server.counter("lookups_total")
    wait_for(lambda: server.counter("lookups_total") > before + 4 * 8)
    assert end(server, number) == 0
    decode.join()


def test_sleep_and_wake(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    with serving(tmp_path, model, *quarter, "--metrics", "--sleep-idle-seconds", "1") as server:
        expected = server.text("Once upon a time", cache_prompt=False)
        for _ in range(2):
            awake = expert_metrics(server)
            wait_for(lambda: server.get("/props")["is_sleeping"])
            assert expert_metrics(server) == awake
            assert server.get("/props")["expert_pack"]["path"].endswith("a.expert-pack")
            assert server.text("Once upon a time", cache_prompt=False) == expected
            assert server.counter("loads_total") > awake["llamacpp:expert_loads_total"]


def test_one_trace_and_one_count_through_sleep(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    """Also through a wake that fails. Asleep, the trace is complete."""
    trace_path, stats_path, fault = tmp_path / "run.trace", tmp_path / "stats.json", tmp_path / "fault"
    outputs = ["--expert-trace", str(trace_path), "--expert-stats-file", str(stats_path)]
    sleepy = ["--metrics", "--sleep-idle-seconds", "1"]
    sizes = []
    with serving(tmp_path, model, *quarter, *outputs, *sleepy, program=faulty(fault)) as server:
        for _ in range(3):
            server.text("Once upon a time", cache_prompt=False)
            wait_for(lambda: server.get("/props")["is_sleeping"])
            check_outputs(server, trace_path, stats_path)
            sizes.append(trace_path.stat().st_size)
        fault.write_text("fail")
        assert server.complete("hello")[0] == 500
        fault.write_text("")
        server.text("Once upon a time", cache_prompt=False)
        wait_for(lambda: server.get("/props")["is_sleeping"])
        check_outputs(server, trace_path, stats_path)
        sizes.append(trace_path.stat().st_size)
    assert sizes[0] < sizes[1] < sizes[2] < sizes[3] == trace_path.stat().st_size
    assert len(read_trace(trace_path).session_starts()) >= 4


def check_outputs(server: Server, trace_path: Path, stats_path: Path) -> None:
    """Trace, statistics and metrics have counted the same, and a replay does."""
    trace = read_trace(trace_path)
    assert trace.end is not None
    replayed = replay_as_recorded(trace, POLICIES[trace.policy]())
    assert (replayed.acquires, replayed.hits, replayed.misses, replayed.evictions) == trace.end[:4]
    assert (np.diff(trace.only_acquires().step) >= 0).all()
    counted = json.loads(stats_path.read_text())
    for name, metric in (("acquires", "lookups"), ("hits", "hits"), ("misses", "misses"), ("evictions", "evictions")):
        assert counted[name] == server.counter(f"{metric}_total") == getattr(trace.end, name)


def expert_metrics(server: Server) -> dict[str, float]:
    return {name: value for name, value in server.metrics().items() if "expert" in name}


def test_waking_without_the_pack(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    """Requests get the reason, and the server wakes as soon as it can."""
    for suffix in (".expert-pack", ".expert-pack.manifest.json"):
        shutil.copy(model.with_suffix(suffix), tmp_path)
    pack, away = tmp_path / "a.expert-pack", tmp_path / "away"
    flags = ["--expert-pack", str(pack), "--sleep-idle-seconds", "1"]
    with serving(tmp_path, model, *quarter, *flags) as server:
        expected = server.text("hello", cache_prompt=False)
        wait_for(lambda: server.get("/props")["is_sleeping"])
        pack.rename(away)
        expect_failed_wakes(server, str(pack))
        away.rename(pack)
        assert server.text("hello", cache_prompt=False) == expected


def test_waking_on_a_dead_disk(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    fault = tmp_path / "fault"
    with serving(tmp_path, model, *quarter, "--sleep-idle-seconds", "1", program=faulty(fault)) as server:
        expected = server.text("hello", cache_prompt=False)
        wait_for(lambda: server.get("/props")["is_sleeping"])
        fault.write_text("fail")
        expect_failed_wakes(server, "Input/output error")
        fault.write_text("")
        assert server.text("hello", cache_prompt=False) == expected


def expect_failed_wakes(server: Server, why: str) -> None:
    """Of several requests at once, and of one after them."""
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda _: server.complete("hello"), range(3)))
    for status, answer in [*replies, server.complete("hello")]:
        assert status == 500 and why in answer["error"]["message"]
    assert server.get("/props")["is_sleeping"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, models: Path, quarter: list[str]) -> dict[str, str]:
    """What each model answers without a router."""
    texts = {}
    for name in ("a", "b"):
        with serving(tmp_path_factory.mktemp("alone"), models / f"{name}.gguf", *quarter) as server:
            texts[name] = server.text("Once upon a time", cache_prompt=False)
    return texts


@pytest.mark.parametrize("installed", [False, True], ids=["module", "script"])
def test_router_with_two_packs(
    tmp_path: Path, models: Path, quarter: list[str], alone: dict[str, str], installed: bool
) -> None:
    script = tmp_path / "llama-server"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nfrom llama_expert_pack.bridge.server import main\nsys.exit(main())\n"
    )
    script.chmod(0o755)
    program = [str(script)] if installed else OURS
    preset = tmp_path / "models.ini"
    preset.write_text(
        f"[a]\nmodel = {models / 'a.gguf'}\nexpert-pack = auto\n\n"
        f"[b]\nmodel = {models / 'b.gguf'}\nexpert-pack = {models / 'b.expert-pack'}\n"
    )
    with serving(tmp_path, None, "--models-preset", str(preset), "--metrics", *quarter[2:], program=program) as server:
        for name in ("a", "b", "a"):
            assert server.text("Once upon a time", cache_prompt=False, model=name) == alone[name]
        for name in ("a", "b"):
            pack = server.get(f"/props?model={name}")["expert_pack"]
            assert pack["path"] == str(models / f"{name}.expert-pack") and pack["cache_slots"] == 16
            assert "llamacpp:expert_hits_total" in server.get(f"/metrics?model={name}")


def test_each_model_of_a_router_writes_its_own_files(tmp_path: Path, models: Path, quarter: list[str]) -> None:
    preset = tmp_path / "models.ini"
    preset.write_text("".join(f"[x/{name}]\nmodel = {models / name}.gguf\nexpert-pack = auto\n\n" for name in "ab"))
    out = tmp_path / "out"
    out.mkdir()
    flags = [*quarter[2:], "--expert-trace", str(out / "run.trace"), "--expert-stats-file", str(out / "stats.json")]
    with serving(tmp_path, None, "--models-preset", str(preset), *flags) as server:
        for name in ("a", "b"):
            server.text("Once upon a time", model=f"x/{name}")
    assert {path.name for path in out.iterdir()} == {
        f"{kind}.x%2F{name}.{suffix}" for name in "ab" for kind, suffix in (("run", "trace"), ("stats", "json"))
    }
    for name in ("a", "b"):
        trace = read_trace(out / f"run.x%2F{name}.trace")
        assert trace.end is not None
        assert json.loads((out / f"stats.x%2F{name}.json").read_text())["hits"] == trace.end.hits


def test_router_says_why_a_model_could_not_be_loaded(tmp_path: Path, models: Path) -> None:
    preset = tmp_path / "models.ini"
    preset.write_text(
        f"[none]\nmodel = {models / 'draft.gguf'}\nexpert-pack = auto\n\n"
        f"[slots]\nmodel = {models / 'a.gguf'}\nexpert-pack = auto\nexpert-stage-slots = x\n\n"
        f"[empty]\nmodel = {models / 'a.gguf'}\nexpert-pack =\n\n"
        f"[gone]\nmodel = {tmp_path / 'gone.gguf'}\n\n"
        f"[stock]\nmodel = {models / 'a.gguf'}\n"
    )
    reasons = {
        "none": "no pack beside the model: ",
        "slots": "--expert-stage-slots must be a whole number from 1 to 1024, not 'x'",
        "empty": "--expert-pack must be the path of a file, not ''",
    }
    with serving(tmp_path, None, "--models-preset", str(preset), "--expert-cache-reserve", "0") as server:
        for name, why in reasons.items():
            status, answer = server.complete("hello", model=name)
            assert status == 500 and f"model name={name} failed to load: {why}" in answer["error"]["message"]
        status, answer = server.complete("hello", model="gone")
        assert (status, answer["error"]["message"]) == (500, "model name=gone failed to load")
        assert server.text("hello", model="stock")  # the router's flag has no effect there
        assert "--expert-cache-reserve would have no effect without an expert pack" in server.log
        listed = {entry["id"]: entry["status"] for entry in server.get("/models")["data"]}
        assert all(why in listed[name]["error"] for name, why in reasons.items())
        assert "error" not in listed["gone"] and "error" not in listed["stock"]
        convert(models / "draft.gguf")
        try:
            assert server.text("hello", model="none")  # the next load works, and forgets the reason
        finally:
            for file in models.glob("draft.expert-pack*"):
                file.unlink()
        listed = {entry["id"]: entry["status"] for entry in server.get("/models")["data"]}
        assert "error" not in listed["none"]


def test_a_disk_that_fails_from_the_start(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    fault = tmp_path / "fault"
    fault.write_text("fail")
    server = launch(tmp_path, ["-m", str(model), *SMALL, *quarter], faulty(fault))
    assert server.process.wait(60) == 1
    assert "a.expert-pack" in server.log and "Input/output error" in server.log


def test_model_that_is_downloaded_first(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=model.parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{files.server_port}/{model.name}"
        pack = str(model.with_suffix(".expert-pack"))
        variables = {"LLAMA_CACHE": str(tmp_path), "HF_HOME": str(tmp_path), "HOME": str(tmp_path)}
        flags = ["-m", str(tmp_path / "later.gguf"), "--model-url", url, *quarter, "--expert-pack", pack]
        with serving(tmp_path, None, *flags, variables=variables) as server:
            props = server.get("/props")
            assert props["expert_pack"]["path"] == pack and props["model_path"] == str(tmp_path / "later.gguf")
            server.text("hello")
        files.shutdown()


def test_fit_counts_the_cache_and_not_the_experts(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    def fitted(*flags: str) -> tuple[int, int]:
        """MiB that fitting takes the model for, and that it would leave free at least."""
        with serving(tmp_path, model, "--fit", "on", "-lv", "5", *flags) as server:
            server.text("hello")
            used = re.search(r"projected to use (\d+) MiB of host memory", server.log)
            left = re.search(r"will leave \d+ >= (\d+) MiB of system memory", server.log)
            assert used and left, server.log
            return int(used[1]), int(left[1])

    experts_mib = sum(length for _, _, length in expert_ranges(model)) // (1 << 20)
    assert experts_mib > 5
    whole, margin = fitted("--no-repack")  # it does not count what is repacked
    trunk, packed_margin = fitted(*quarter, "--expert-cache", "2MiB")
    assert whole - trunk in (experts_mib, experts_mib + 1)
    assert packed_margin == margin + 2
    _, packed_margin = fitted(*quarter, "--expert-cache", "64GiB")
    assert packed_margin - margin in (experts_mib, experts_mib + 1)  # no cache takes more
