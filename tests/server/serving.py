"""Servers for the tests: ours, stock's, and ours with a disk that breaks on command."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.stock import STOCK_LIB, environment

OURS = [sys.executable, "-m", "llama_expert_pack.bridge.server"]
STOCK = [str(STOCK_LIB / "llama-server")]
SMALL = [
    "-c",
    "1024",
    "-np",
    "2",
    "-t",
    "1",
    "-tb",
    "1",
    "--no-ui",
    "--seed",
    "1",
    "--temp",
    "0",
    "--ctx-checkpoints",
    "0",
]


def faulty(fault_file: Path) -> list[str]:
    return [sys.executable, "-m", "tests.server.faulty_server", str(fault_file)]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    log_path: Path
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def call(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 120) -> tuple[int, Any]:
        """Status and answer, decoded if it is JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                status, text, kind = reply.status, reply.read().decode(), reply.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            status, text, kind = error.code, error.read().decode(), error.headers["Content-Type"]
        return status, json.loads(text) if "json" in (kind or "") else text

    def get(self, path: str) -> Any:
        status, answer = self.call(path)
        assert status == 200, answer
        return answer

    def complete(self, prompt: str, n_predict: int = 16, **options: Any) -> tuple[int, Any]:
        body = {"prompt": prompt, "n_predict": n_predict, "ignore_eos": True, "temperature": 0, **options}
        return self.call("/completion", body)

    def text(self, prompt: str, n_predict: int = 16, **options: Any) -> str:
        status, answer = self.complete(prompt, n_predict, **options)
        assert status == 200, answer
        return str(answer["content"])

    def metrics(self) -> dict[str, float]:
        lines = (line.rsplit(" ", 1) for line in self.get("/metrics").splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def counter(self, name: str) -> float:
        return self.metrics()[f"llamacpp:expert_{name}"]

    def wait_ready(self, timeout_s: float = 120) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log[-3000:]}"
            try:
                return self.call("/health")[0] == 200
            except OSError:
                return False

        wait_for(answers, timeout_s)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


def wait_for(condition: Any, timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def launch(
    folder: Path, arguments: list[str], program: list[str] = OURS, variables: Mapping[str, str] | None = None
) -> Server:
    port = free_port()
    log_path = folder / f"server-{port}.log"
    env = {k: v for k, v in environment(stock=False).items() if not k.startswith("LLAMA_")} | dict(variables or {})
    command = [*program, "--host", "127.0.0.1", "--port", str(port), *arguments]
    with log_path.open("wb") as log:
        return Server(
            subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, preexec_fn=_interruptible
            ),
            port,
            log_path,
        )


def _interruptible() -> None:
    """In the child: a shell's background jobs ignore SIGINT, and so would the server that such a test run starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def serving(
    folder: Path,
    model: Path | None,
    *arguments: str,
    program: list[str] = OURS,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A ready server; it must still live at the end and then stop on SIGTERM with status 0."""
    chosen = [] if model is None else ["-m", str(model)]
    server = launch(folder, [*chosen, *SMALL, *arguments], program, variables)
    try:
        server.wait_ready()
        yield server
        assert server.process.poll() is None, f"ended with {server.process.returncode}:\n{server.log[-3000:]}"
        assert server.stop() == 0, server.log[-3000:]
    finally:
        server.process.kill()
        server.process.wait()


def run_to_end(arguments: list[str], variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in environment(stock=False).items() if not k.startswith("LLAMA_")} | dict(variables or {})
    return subprocess.run(
        [*OURS, *arguments], capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL, timeout=120, check=False
    )
