"""/metrics, /props, /slots and /health beside a pack; failures of the disk; clients that go away."""

from __future__ import annotations

import json
import re
import socket
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Breaking
from tests.server.serving import Server, serving, wait_for


def test_metrics_are_valid_and_count(packed: Server) -> None:
    packed.text("hello")
    families = {family.name: family for family in text_string_to_metric_families(packed.get("/metrics"))}
    ours = {name: family for name, family in families.items() if name.startswith("llamacpp:expert_")}
    assert len(ours) == 19 and "llamacpp:prompt_tokens" in families
    assert all(family.documentation and family.type in ("counter", "gauge") for family in ours.values())
    found = packed.metrics()
    n_used = found["llamacpp:expert_hits_total"] + found["llamacpp:expert_misses_total"]
    assert n_used >= found["llamacpp:expert_lookups_total"] > 0
    assert found["llamacpp:expert_loads_total"] == found["llamacpp:expert_misses_total"]
    before = found["llamacpp:expert_lookups_total"]
    packed.text("hello again", 8)
    assert packed.counter("lookups_total") >= before + 4 * 8
    assert packed.counter("cache_bytes") == packed.get("/props")["expert_pack"]["cache_bytes"]["CPU"]


def test_the_log_says_where_experts_have_room(packed: Server) -> None:
    pack = packed.get("/props")["expert_pack"]
    said = re.search(
        r"expert pack (\S+): 64 experts of 4 layers, .* MiB; room for (\d+) \((\d+) %\) in .* MiB on CPU; prompts in batches of 1024 tokens; policy",
        packed.log,
    )
    assert said is not None and said[1] == pack["path"] and said[2] == str(pack["cache_slots"]) and said[3] == "25"


def test_a_requests_timings_tell_of_its_experts(packed: Server) -> None:
    before = packed.metrics()
    status, answer = packed.complete("x " * 100, 8, cache_prompt=False)
    assert status == 200
    after, timings = packed.metrics(), answer["timings"]
    counted = {name.removeprefix("llamacpp:expert_"): value - before[name] for name, value in after.items()}
    wanted = counted["hits_total"] + counted["misses_total"]
    assert timings["expert_hit_rate"] == pytest.approx(counted["hits_total"] / wanted)
    assert timings["expert_read_bytes"] == counted["read_bytes_total"] > 0
    assert timings["expert_host_hit_rate"] == timings["expert_host_bytes"] == 0
    assert timings["expert_wait_ms"] == pytest.approx(1000 * counted["wait_seconds_total"])
    assert re.search(r"experts = +\d+\.\d % hits \(0\.0 % in host memory\), \d+\.\d MB read from the drive", packed.log)


def test_a_long_batch_says_how_far_it_is(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    with serving(tmp_path, model, *quarter, variables={"EXPERT_PACK_PROGRESS_SECONDS": "0"}) as server:
        server.text("word " * 200, 1)
        said = re.findall(
            r"prompt: (\d) of 4 expert layers of a batch after \d+ s: \d+\.\d GB of experts read, \d+\.\d GB/s, about \d+ s left",
            server.log,
        )
    assert said[:3] == ["1", "2", "3"]
    with serving(tmp_path, model, *quarter) as server:
        server.text("word " * 200, 1)
        assert "expert layers of a batch" not in server.log, "short ones say nothing"


def test_a_quarter_reads_and_evicts(packed: Server) -> None:
    packed.text("x " * 150, cache_prompt=False)
    assert packed.counter("evictions_total") > 0
    assert packed.counter("cache_resident") == packed.counter("cache_slots") == 16


def test_start_reads_few_experts(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model, "--expert-pack", "auto", "--metrics") as server:
        assert server.counter("loads_total") <= 4 * 2 * 2  # what one decode of two tokens may use, of 64


def test_health_and_slots_during_a_prefill(breaking: Breaking) -> None:
    server = breaking.server
    breaking.fault.write_text("slow 0.05")
    before = server.counter("loads_total")
    prefill = threading.Thread(target=server.complete, args=("word " * 400, 1))
    prefill.start()
    wait_for(lambda: server.counter("loads_total") > before)
    assert server.get("/health") == {"status": "ok"}
    assert [slot["is_processing"] for slot in server.get("/slots")].count(True) == 1
    assert prefill.is_alive()
    breaking.fault.write_text("")
    prefill.join()


def test_a_read_error_fails_one_request(breaking: Breaking) -> None:
    server = breaking.server
    expected = server.text("Once upon a time", 24, cache_prompt=False)
    breaking.fault.write_text("fail")
    status, answer = server.complete("Once upon a time", 24, cache_prompt=False)
    assert status == 500
    assert "a.expert-pack" in answer["error"]["message"] and "Input/output error" in answer["error"]["message"]
    breaking.fault.write_text("")
    assert server.text("Once upon a time", 24, cache_prompt=False) == expected
    assert not any(slot["is_processing"] for slot in server.get("/slots"))
    assert server.counter("failed_decodes_total") >= 1
    assert server.counter("read_errors_total") >= 1


def test_a_client_that_leaves_frees_its_slot(packed: Server) -> None:
    predicted = "llamacpp:tokens_predicted_total"
    before = packed.metrics()[predicted]
    body = json.dumps({"prompt": "hello", "n_predict": 900, "stream": True, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", packed.port)) as client:
        head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert client.recv(1024)
    wait_for(lambda: not any(slot["is_processing"] for slot in packed.get("/slots")))
    assert packed.metrics()[predicted] < before + 900
