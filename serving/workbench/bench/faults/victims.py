"""The server under test: its processes, what they hold, requests that run all the time while something else happens to
it, and what is left when it has ended."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import httpx

from serving import fork_loop
from serving.workbench.bench.faults.answers import Answer, Asked, ask
from serving.workbench.bench.server.abuse.watch import resident_bytes
from serving.workbench.bench.server.load import read_metrics, served_model
from serving.workbench.bench.server.process import UBATCH, ServerProcess, running_server
from serving.workbench.bench.server.requests import RequestFailed, Server

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

    def starting(self) -> list[int]:
        """Process ids of ranks that start: they are forked (`fork_loop`), but not in the log yet."""
        logged = set(self.engines().values())
        return [pid for pid in self.processes() if pid not in logged and _is_rank(pid, self.pid)]

    def processes(self) -> list[int]:
        """Process ids of everything that it has started and that runs, and its own."""
        mark = f"TMPDIR={self.folder}".encode()
        return [pid for pid in all_pids() if mark in _read(pid, "environ").split(b"\0") and runs(pid)]

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
    with tempfile.TemporaryDirectory(prefix="ubatch-faults-") as folder:
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


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    state = _read(pid, "stat").rpartition(b") ")[2][:1]
    return state not in (b"", b"Z", b"X")


def by_reason(counts: Mapping[str, int]) -> dict[str, int]:
    """Of what `Subject.restarts` counts, the restarts alone."""
    return {reason: count for reason, count in counts.items() if reason != "resumed"}


def _parent(pid: int) -> int:
    """The process that has started it; 0 if it is gone."""
    fields = _read(pid, "stat").rpartition(b") ")[2].split()
    return int(fields[1]) if fields else 0


def _is_rank(pid: int, api: int) -> bool:
    server, mark = _parent(pid), fork_loop.__name__.encode()
    return _parent(server) == api and all(mark in _read(each, "cmdline") for each in (pid, server))


def all_pids() -> list[int]:
    """Process ids of this machine."""
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    """A file of a process in `/proc`; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _command_line(pid: int) -> str:
    return f"{pid} {_read(pid, 'cmdline').replace(chr(0).encode(), b' ').decode(errors='replace')[:120]}"


# -- the requests meanwhile --------------------------------------------------------------------------------------------


_AFTER_ERROR_S = 0.5
_LAST_S = 300.0


@dataclass
class Load:
    """Requests that are asked again and again, each as soon as its last answer has come.

    Attributes:
        answers: request's index and its answer, in the order in which they came.
        times: of each request that runs, and its successors, when something came, by `time.monotonic()`.
        kills: engines that were killed meanwhile.
    """

    requests: Sequence[Asked]
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    kills: int = 0

    def cases(self, references: Sequence[Answer]) -> list[tuple[Asked, Answer, Answer]]:
        """For the referee."""
        return [(self.requests[index], references[index], answer) for index, answer in self.answers]


@asynccontextmanager
async def running_load(
    subject: Subject, requests: Sequence[Asked], at_once: int, *, wait: bool = True
) -> AsyncIterator[Load]:
    """Keep so many of the requests running in the block, all in turn; after it, wait for the last answers, or drop
    them."""
    load, stop = Load(requests, times=[[] for _ in range(at_once)]), asyncio.Event()

    async def repeat(client: httpx.AsyncClient, index: int) -> None:
        places = cycle(range(index, len(requests), at_once))
        while not stop.is_set():
            place = next(places)
            answer = await ask(
                subject.server, client, requests[place], lambda _: load.times[index].append(time.monotonic())
            )
            load.answers.append((place, answer))
            if answer.error is not None:
                if not subject.alive:
                    return
                await asyncio.sleep(_AFTER_ERROR_S)

    async with subject.server.client() as client:
        running = [asyncio.create_task(repeat(client, index)) for index in range(at_once)]
        try:
            yield load
            stop.set()
            done, late = await asyncio.wait(running, timeout=_LAST_S if wait else 0)
            for task in done:
                task.result()
            for index, task in enumerate(running):
                if task in late and wait:
                    error = f"no answer {_LAST_S:g} s after the last fault"
                    load.answers.append((index, Answer([], error=error)))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


class NotHealthy(Exception):
    """The server did not become healthy again; the message says after what."""


async def kill_engines(
    subject: Subject,
    load: Load,
    count: int,
    rng: random.Random,
    *,
    between_s: tuple[float, float],
    again_s: float,
    twice: bool = True,
) -> None:
    """Kill a random engine that many times, each time some seconds after the server is healthy; with `twice`
    every fifth time once more while the engines are started. The load counts them.

    Raises:
        NotHealthy: it was not healthy `again_s` seconds after one of them.
    """
    while load.kills < count:
        await _healthy(subject, load, again_s)
        await asyncio.sleep(rng.uniform(*between_s))
        if engines := list(subject.engines().values()):
            load.kills += kill(rng.choice(engines))
        if twice and load.kills % 5 == 4 and load.kills < count:
            await subject.wait_sick(again_s)
            await asyncio.sleep(rng.uniform(0.0, 0.3))  # a start takes less than a second
            if starting := subject.starting():
                load.kills += kill(rng.choice(starting))
    await _healthy(subject, load, again_s)


async def _healthy(subject: Subject, load: Load, again_s: float) -> None:
    if await subject.wait_healthy(again_s) is None:
        what = f"not healthy {again_s:g} s" if subject.alive else "the server has ended"
        raise NotHealthy(f"{what} after kill {load.kills}")


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal; whether the process was there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
