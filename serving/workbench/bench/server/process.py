"""Start a server as a process of its own, wait until it is ready, and stop it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from serving.ranks import free_port
from ubatch import UBatchError

UBATCH = (sys.executable, "-c", "import sys; from serving.cli import main; sys.exit(main())")
"""The `ubatch` command, run by this interpreter without looking for its script."""

_START_S = 300.0
_STOP_S = 60.0
_KILL_S = 5.0
_TAIL = 4000


class ServerFailed(UBatchError):
    """The server did not start, or not in time; the message ends with its last output."""


@dataclass
class ServerProcess:
    """A running server: the API process, and what it has started, all in a session of their own; its URL without
    `/v1`; and the file with its output."""

    process: subprocess.Popen[bytes]
    base_url: str
    log: IO[bytes]

    def output(self) -> str:
        """The end of its output so far."""
        self.log.flush()
        return Path(self.log.name).read_bytes()[-_TAIL:].decode(errors="replace")

    def wait_until_healthy(self, start_s: float = _START_S) -> None:
        """Return once `/health` answers 200.

        Raises:
            ServerFailed: the process ended, or it took more than `start_s` seconds.
        """
        deadline = time.monotonic() + start_s
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if (status := self.process.poll()) is not None:
                    raise ServerFailed(f"the server ended with status {status} before it was ready:\n{self.output()}")
                with suppress(httpx.HTTPError):  # not listening yet
                    if client.get(f"{self.base_url}/health").status_code == httpx.codes.OK:
                        return
                time.sleep(0.2)
        raise ServerFailed(f"the server was not ready after {start_s:g} s:\n{self.output()}")

    def stop(self) -> int:
        """Ask the server to end (SIGTERM), and kill it if it does not; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_S)
        return end_group(self.process)


def end_group(process: subprocess.Popen[bytes]) -> int:
    """End a process that leads a session of its own, and what is left of the processes that it started: SIGTERM, and
    SIGKILL after five seconds. Returns its exit status."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _KILL_S
        with suppress(ProcessLookupError):  # the group has ended
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()  # a zombie is still of the group
                os.killpg(process.pid, 0)
                time.sleep(0.02)
    return process.wait()


def with_variables(changed: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with other values; None removes a variable."""
    return {name: value for name, value in (dict(os.environ) | dict(changed)).items() if value is not None}


@contextmanager
def running_server(
    model: Path,
    flags: Sequence[str] = (),
    *,
    environment: Mapping[str, str | None] | None = None,
    program: Sequence[str] = UBATCH,
    start_s: float = _START_S,
) -> Iterator[ServerProcess]:
    """Run `PROGRAM serve MODEL FLAGS` on a free port; enters the block once it is healthy, and stops it at the end.

    Args:
        environment: variables on top of this process's; None removes one.
        program: the `ubatch` command, or vLLM's.
        start_s: it may take that long to be healthy.

    Raises what `ServerProcess.wait_until_healthy` raises.
    """
    port = free_port()
    command = [*program, "serve", str(model), "--port", str(port), *flags]
    with started_server(command, f"http://127.0.0.1:{port}", environment=environment) as server:
        server.wait_until_healthy(start_s)
        yield server


@contextmanager
def started_server(
    command: Sequence[str], base_url: str = "", *, environment: Mapping[str, str | None] | None = None
) -> Iterator[ServerProcess]:
    """Run a command that serves, and stop it after the block; after an exception it may not finish its requests. The
    block is entered at once."""
    with tempfile.NamedTemporaryFile(prefix="ubatch-serve-", suffix=".log") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=with_variables(environment or {}),
            start_new_session=True,
        )
        server = ServerProcess(process, base_url, log)
        try:
            yield server
        except BaseException:
            end_group(process)
            raise
        server.stop()
