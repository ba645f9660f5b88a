"""One running llama-server and its HTTP interface."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serving.launchers import server_command, server_environment

START_TIMEOUT_S = 300
REQUEST_TIMEOUT_S = 600
COUNTER_PREFIX = "llamacpp:expert_"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Server:
    """A server that answers on this port of 127.0.0.1."""

    process: subprocess.Popen[bytes]
    port: int

    def open(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The reply to a GET, or to a POST of `body`. urllib.error.HTTPError for an error status."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON reply to a POST. Raises as :meth:`open`."""
        with self.open(path, body) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed answer. Closing the generator early closes the connection: that cancels."""
        with closing(self.open(path, {**body, "stream": True})) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    yield json.loads(line[len(b"data: ") :])

    def expert_counters(self) -> dict[str, float]:
        """The cache counters in /metrics by their short names, such as "hits_total"; empty for stock."""
        with self.open("/metrics") as reply:
            lines = reply.read().decode().splitlines()
        values = (line.rsplit(" ", 1) for line in lines if line.startswith(COUNTER_PREFIX))
        return {name.removeprefix(COUNTER_PREFIX): float(value) for name, value in values}


@contextmanager
def running(kind: str, model: Path, log: Path, arguments: Sequence[str]) -> Iterator[Server]:
    """A server that is ready; it is stopped at the end. RuntimeError, with the log's end, if it does not start."""
    port = free_port()
    command = [*server_command(kind), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "--metrics"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=server_environment(kind)
        )
    try:
        server = Server(process, port)
        _wait_until_ready(server, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(server: Server, log: Path) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        if server.process.poll() is not None:
            tail = log.read_text(errors="replace").splitlines()[-5:]
            raise RuntimeError(f"the server ended with {server.process.returncode}; see {log}:\n" + "\n".join(tail))
        try:
            with server.open("/health"):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the server was not ready after {START_TIMEOUT_S} s; see {log}")
