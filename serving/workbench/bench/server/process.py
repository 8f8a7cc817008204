"""Start a server as a process of its own, wait until it is ready, and stop it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from serving.ranks import free_port
from ubatch import UBatchError

__all__ = ["UBATCH", "ServerFailed", "ServerProcess", "running_server"]

UBATCH = (sys.executable, "-c", "import sys; from serving.cli import main; sys.exit(main())")
"""The `ubatch` command, run by this interpreter without looking for its script."""

_START_S = 300.0
_STOP_S = 60.0
_TAIL = 4000


class ServerFailed(UBatchError):
    """The server did not start, or not in time; the message ends with its last output."""


@dataclass
class ServerProcess:
    """A running `ubatch serve`: the API process, whose children are the engines; its URL without `/v1`; and the file
    with its output."""

    process: subprocess.Popen[bytes]
    base_url: str
    log: IO[bytes]

    def output(self) -> str:
        """The end of its output so far."""
        self.log.flush()
        return Path(self.log.name).read_bytes()[-_TAIL:].decode(errors="replace")

    def wait_until_healthy(self) -> None:
        """Return once `/health` answers 200.

        Raises:
            ServerFailed: the process ended, or it took more than five minutes.
        """
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if (status := self.process.poll()) is not None:
                raise ServerFailed(f"the server ended with status {status} before it was ready:\n{self.output()}")
            try:
                if httpx.get(f"{self.base_url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass  # not listening yet
            time.sleep(0.2)
        raise ServerFailed(f"the server was not ready after {_START_S:g} s:\n{self.output()}")

    def stop(self) -> int:
        """Ask the server to end (SIGTERM), and kill it if it does not; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextmanager
def running_server(
    model: Path, flags: Sequence[str] = (), *, environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Run `ubatch serve MODEL FLAGS` on a free port; enters the block once it is healthy, and stops it at the end.

    `environment` has variables on top of this process's. Raises what `ServerProcess.wait_until_healthy` raises.
    """
    port, variables = free_port(), os.environ | (environment or {})
    command = [*UBATCH, "serve", str(model), "--port", str(port), *flags]
    with tempfile.NamedTemporaryFile(prefix="ubatch-serve-", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=variables
        )
        server = ServerProcess(process, f"http://127.0.0.1:{port}", log)
        try:
            server.wait_until_healthy()
            yield server
        finally:
            server.stop()
