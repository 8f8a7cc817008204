"""Start a server as a process of its own, wait until it is ready, and stop it; and watch one: its processes, what they
hold, whether they compute, and what is left when it has ended."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx

from serving import fork_loop
from serving.ranks import free_port
from serving.workbench.bench.server.load import read_metrics, served_model
from serving.workbench.bench.server.requests import RequestFailed, Server
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


# -- a server that is watched ------------------------------------------------------------------------------------------


_REST_WINDOW_S, _REST_SHARE, _REST_S = 0.2, 0.1, 10.0
_ENGINE = re.compile(r" engine rank=(\d+) pid=(\d+)")
_LOOK_S = 0.02
_CACHES = "torchinductor_"
"""How names of torch's caches begin, which may stay."""
_END_S, _LEFT_S = 60.0, 5.0


@dataclass(frozen=True)
class Footprint:
    """What a process holds: bytes of resident memory, open descriptors, threads."""

    resident: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Ended:
    """How a server ended.

    Attributes:
        status: its exit status; None if it had to be killed.
        processes: command lines of its processes that were left over.
        files: names of the files and folders that were left over, of its own folder for temporary ones.
    """

    status: int | None
    processes: list[str]
    files: list[str]


@dataclass
class Subject:
    """A server, and how to reach it.

    Attributes:
        folder: its folder for temporary files, by which its processes are known, too.
        start_s: seconds from the start of its process until it was healthy.
        ended: how it ended; None while it runs.
    """

    process: ServerProcess
    server: Server
    folder: Path
    start_s: float
    ended: Ended | None = field(default=None)

    @property
    def pid(self) -> int:
        return self.process.process.pid

    @property
    def alive(self) -> bool:
        return self.process.process.poll() is None

    def log(self) -> str:
        """All that it has printed."""
        return Path(self.process.log.name).read_text(errors="replace")

    def engines(self) -> dict[int, int]:
        """Rank -> process id, of the ranks whose process runs: as the log tells them."""
        told = {int(rank): int(pid) for rank, pid in _ENGINE.findall(self.log())}
        return {rank: pid for rank, pid in told.items() if runs(pid)}

    def ranks(self) -> list[int]:
        """Process ids of all that are forked as ranks (`fork_loop`), the oldest first."""
        return sorted(pid for pid in self.processes() if _is_rank(pid, self.pid))

    def starting(self) -> list[int]:
        """Process ids of ranks that start: they are not in the log yet."""
        logged = set(self.engines().values())
        return [pid for pid in self.ranks() if pid not in logged]

    def processes(self) -> list[int]:
        """Process ids of everything that it has started and that runs, and its own."""
        mark = f"TMPDIR={self.folder}".encode()
        return [pid for pid in _all_pids() if mark in _read(pid, "environ").split(b"\0") and runs(pid)]

    async def wait_healthy(self, timeout_s: float) -> float | None:
        """Wait until `/health` answers 200; returns the seconds that took, or None if it did not."""
        return await self._wait_health(httpx.codes.OK, timeout_s)

    async def wait_sick(self, timeout_s: float) -> float | None:
        """Wait until `/health` answers 503; as `wait_healthy`."""
        return await self._wait_health(httpx.codes.SERVICE_UNAVAILABLE, timeout_s)

    async def _wait_health(self, status: int, timeout_s: float) -> float | None:
        begun = time.monotonic()
        async with self.server.client() as client:
            while self.alive and time.monotonic() - begun < timeout_s:
                with suppress(httpx.HTTPError):
                    if (await client.get("/health", timeout=5.0)).status_code == status:
                        return time.monotonic() - begun
                await asyncio.sleep(_LOOK_S)
        return None

    async def restarts(self) -> Counter[str]:
        """Restarts so far by reason, and resumed requests as `resumed`, from `/metrics`."""
        found: Counter[str] = Counter()
        with suppress(httpx.HTTPError, RequestFailed):  # it has ended
            for sample in await read_metrics(self.server):
                if sample.name == "ubatch:engine_restarts_total":
                    found[sample.labels.get("reason", "?")] += int(sample.value)
                elif sample.name == "ubatch:requests_resumed_total":
                    found["resumed"] += int(sample.value)
        return found

    def end(self) -> Ended:
        """Ask it to end; returns how it did, and what is left five seconds later."""
        if self.ended is None:
            process = self.process.process
            if self.alive:
                process.send_signal(signal.SIGTERM)
            status: int | None = None
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(_END_S)
            deadline = time.monotonic() + _LEFT_S
            while (left := self.processes()) and status is not None and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            files = sorted(each.name for each in self.folder.iterdir() if not each.name.startswith(_CACHES))
            self.ended = Ended(status, [_command_line(pid) for pid in left], files)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return self.ended


@contextmanager
def subject(
    model: Path, flags: Sequence[str], *, program: Sequence[str] = UBATCH, variables: Mapping[str, str] | None = None
) -> Iterator[Subject]:
    """A server that is ready; it has ended after the block, and `ended` says how."""
    with tempfile.TemporaryDirectory(prefix="ubatch-bench-") as folder:
        begun = time.monotonic()
        own = {"TMPDIR": folder, **(variables or {})}
        with running_server(model, flags, program=program, environment=own) as process:
            start_s = time.monotonic() - begun
            asked = Server(process.base_url)
            server = Server(process.base_url, asyncio.run(served_model(asked, None)).name)
            found = Subject(process, server, Path(folder), start_s)
            yield found
            found.end()


def footprint(pid: int) -> Footprint:
    """Raises RequestFailed if the process is gone."""
    resident = resident_bytes(pid)
    try:
        return Footprint(resident, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))
    except OSError as error:
        raise RequestFailed(f"process {pid} of the server is gone.") from error


def resident_bytes(pid: int, *, peak: bool = False) -> int:
    """Resident memory of a process: now, or its peak so far. Raises RequestFailed if it is gone."""
    name = b"VmHWM:" if peak else b"VmRSS:"
    for line in _read(pid, "status").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RequestFailed(f"process {pid} of the server is gone.")


def by_reason(counts: Mapping[str, int]) -> dict[str, int]:
    """Of what `Subject.restarts` counts, the restarts alone."""
    return {reason: count for reason, count in counts.items() if reason != "resumed"}


# -- what /proc says ---------------------------------------------------------------------------------------------------


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    return _stat(pid)[:1] not in ([], [b"Z"], [b"X"])


def pids_of(sessions: Collection[int]) -> list[int]:
    """Process ids of the processes of these sessions, given by the ids of their leaders."""
    return [pid for pid in _all_pids() if (fields := _stat(pid)) and int(fields[3]) in sessions]


def wait_for_rest(sessions: Collection[int]) -> bool:
    """Wait until the processes of these sessions hardly use a core: an engine may poll for a while after its last
    answer, vLLM's workers for a second. Returns False if they still do after 10 s."""
    deadline = time.monotonic() + _REST_S
    used = cpu_seconds(sessions)
    while time.monotonic() < deadline:
        time.sleep(_REST_WINDOW_S)
        before, used = used, cpu_seconds(sessions)
        if used - before < _REST_SHARE * _REST_WINDOW_S and not _waits_for_a_core(sessions):
            return True
    return False


def cpu_seconds(sessions: Collection[int]) -> float:
    """CPU time so far of the processes of these sessions that still run."""
    ticks = sum(sum(map(int, _stat(pid)[11:13])) for pid in pids_of(sessions))
    return ticks / os.sysconf("SC_CLK_TCK")


def _waits_for_a_core(sessions: Collection[int]) -> bool:
    """Whether one of their threads could run: next to other work it may get no core for a while."""
    threads = (thread for pid in pids_of(sessions) for thread in Path(f"/proc/{pid}/task").glob("*"))
    return any(_stat(str(thread.relative_to("/proc")))[:1] == [b"R"] for thread in threads)


def _is_rank(pid: int, api: int) -> bool:
    server, mark = _parent(pid), fork_loop.__name__.encode()
    return _parent(server) == api and all(mark in _read(each, "cmdline") for each in (pid, server))


def _parent(pid: int) -> int:
    """The process that has started it; 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _command_line(pid: int) -> str:
    return f"{pid} {_read(pid, 'cmdline').replace(chr(0).encode(), b' ').decode(errors='replace')[:120]}"


def _all_pids() -> list[int]:
    """Process ids of this machine."""
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _stat(place: int | str) -> list[bytes]:
    """The fields of the `stat` of a process or thread from the third on; its name may have blanks."""
    return _read(place, "stat").rpartition(b") ")[2].split()


def _read(place: int | str, name: str) -> bytes:
    """A file of a process or thread in `/proc`; empty if it is gone."""
    try:
        return Path(f"/proc/{place}/{name}").read_bytes()
    except OSError:
        return b""
