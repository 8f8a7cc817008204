"""`ubatch serve` as a process, and what its clients see."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from repository import ROOT
from served import read_metrics, values

MODEL = "examples/models/tiny-moe"

PATIENCE_S = 90.0
PROMPTS = ["def main(", "import os", "class Server:", "for i in", "if __name__", "return self.", "while True:", "try:"]


class Server:
    """A server in a process of its own, and what it has printed."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-c", "import sys; from serving.cli import main; sys.exit(main())", "serve", *words]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
        self.process.stdout.close()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str) -> str:
        """The first group of a line that is printed, now or later."""
        deadline = time.monotonic() + PATIENCE_S
        over = False
        while not over:
            over = not self._reader.is_alive() or time.monotonic() > deadline
            if found := re.search(pattern, self.text):
                return found[1] if found.groups() else found[0]
            time.sleep(0.05)
        pytest.fail(f"{pattern!r} does not come (exit status {self.process.poll()}):\n{self.text}")

    @property
    def url(self) -> str:
        return self.wait_for(r"ready on (http://\S+)")

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its exit status; everything that it started must be gone too."""
        try:
            status = self.process.wait(timeout_s)
            self._reader.join(timeout_s)  # until nobody has the pipe any more
            assert not self._reader.is_alive(), f"somebody lives on:\n{self.text}"
            return status
        finally:
            if self.process.poll() is None or self._reader.is_alive():
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@contextmanager
def running(*words: str) -> Iterator[Server]:
    """A server that has ended afterwards, whatever happened."""
    server = Server(*words)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.end()


def metric(server: Server, name: str, **labels: str) -> float:
    return sum(values(read_metrics(server.url), name, **labels))


class Stream:
    """A completion of exactly so many tokens, streamed by a thread from its first line on.

    Attributes:
        lines: what has come, until the connection ends.
    """

    def __init__(self, url: str, max_tokens: int) -> None:
        self.lines: list[str] = []
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url, max_tokens))
        self._thread.start()
        assert self._began.wait(PATIENCE_S)

    def to_its_end(self) -> list[str]:
        self._thread.join(PATIENCE_S)
        return self.lines

    def has_error(self, text: str) -> bool:
        """Whether it ends with an error that says this."""
        return any('"error"' in line and text in line for line in self.to_its_end())

    def _read(self, url: str, max_tokens: int) -> None:
        body = {"model": MODEL, "prompt": "def main(", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
                for line in response.iter_lines():
                    self.lines.append(line)
                    self._began.set()
        except httpx.HTTPError as error:
            self.lines.append(f"cut: {error!r}")
        finally:
            self._began.set()


def sick(url: str) -> str:
    """What `/health` says once it says that the server is not well, which it must within 20 seconds."""
    begun = time.monotonic()
    health = httpx.get(f"{url}/health", timeout=PATIENCE_S)
    while health.status_code == 200 and time.monotonic() - begun < 20:
        time.sleep(0.05)
        health = httpx.get(f"{url}/health", timeout=PATIENCE_S)
    assert health.status_code == 503
    return health.text
