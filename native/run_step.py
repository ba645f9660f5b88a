"""Runs one step of a build: its output goes to a log, and the screen shows what a person wants to know.

Usage: run_step.py LOG TITLE COMMAND...

Shown are the title, ninja's count with the time that is left, and the lines of optional parts (`part: ...`). When the
command fails: the compiler's or the script's own words, or one sentence if it was the network. Exit status: the command's.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

COUNT = re.compile(r"^\s*\[(\d+)/(\d+)\] ")  # ninja's
PART = re.compile(r"^\s*-- (part: .*)$")
NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Failed to resolve|Connection refused|Network is unreachable|Max retries"
    r"|No matching distribution found|ReadTimeoutError|ConnectTimeoutError|SSLError|ProxyError"
)
# sentences of our own scripts, which pip indents; and pip's, which say nothing
OURS = re.compile(r"^\s*error: (?!metadata-generation-failed|subprocess-exited|editable_wheel|Failed building)")
CONTINUED = re.compile(r"^\s+(- |Debian, |Fedora, |Then run )")
LINES_SHOWN = 40


class Screen:
    """A count in place on a terminal, a line at each tenth elsewhere."""

    def __init__(self, title: str) -> None:
        self._in_place = sys.stdout.isatty()
        self._started = time.monotonic()
        self._first = self._tenth = -1
        self._count_started = self._started
        self._width = 0
        self.say(title)

    def say(self, text: str) -> None:
        if self._width:
            print("\r" + " " * self._width + "\r", end="")
            self._width = 0
        print(text, flush=True)

    def count(self, done: int, total: int) -> None:
        if self._first < 0:  # what was built before took no time
            self._first, self._count_started = done - 1, time.monotonic()
        passed = time.monotonic() - self._count_started
        left = passed / (done - self._first) * (total - done)
        text = f"  {done} of {total} files, {_time(passed)}" + (f", about {_time(left)} left" if done < total else "")
        if self._in_place:
            print("\r" + text.ljust(self._width), end="", flush=True)
            self._width = max(self._width, len(text))
        elif done * 10 // total > self._tenth or done == total:
            print(text, flush=True)
        self._tenth = done * 10 // total

    def end(self) -> None:
        self.say(f"  done in {_time(time.monotonic() - self._started)}")


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def reason(lines: list[str], log: Path) -> str:
    """Why a command with this output failed, for a person."""
    first = next((i for i, line in enumerate(lines) if OURS.match(line)), None)
    if first is not None:
        more = itertools.takewhile(CONTINUED.match, lines[first + 1 :])
        return textwrap.dedent("".join([lines[first], *more])).rstrip()
    failed = next((i for i, line in enumerate(lines) if line.lstrip().startswith("FAILED: ")), None)
    if failed is not None:
        shown = lines[failed : failed + LINES_SHOWN]
        return "\n".join([*(line.rstrip() for line in shown), f"error: a file did not compile; all is in {log}"])
    if any(map(NO_NETWORK.search, lines)):
        return (
            "error: packages can't be downloaded: connect to a Python package index (pip's settings for index, proxy and "
            f"certificates hold), then run the same command again; what pip said is in {log}"
        )
    return "\n".join([*(line.rstrip() for line in lines[-LINES_SHOWN:]), f"error: this step failed; all is in {log}"])


def show(output: Iterable[str], log: Path, screen: Screen) -> list[str]:
    """Passes a command's output on; returns its lines."""
    lines: list[str] = []
    parts: set[str] = set()
    with log.open("w") as file:
        for line in output:
            file.write(line)
            lines.append(line)
            count, part = COUNT.match(line), PART.match(line)
            if count and int(count[1]) > 0:
                screen.count(int(count[1]), int(count[2]))
            elif part and part[1] not in parts:
                parts.add(part[1])
                screen.say(f"  {part[1]}")
    return lines


def main(log_path: str, title: str, *command: str) -> int:
    log = Path(log_path)
    log.parent.mkdir(parents=True, exist_ok=True)
    screen = Screen(title)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    ) as run:
        assert run.stdout is not None
        lines = show(run.stdout, log, screen)
    if run.returncode == 0:
        screen.end()
    else:
        screen.say(f"  failed: {log}")
        print(reason(lines, log), file=sys.stderr)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
