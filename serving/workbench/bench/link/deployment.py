"""Two servers of one deployment, one on each host, and the arms: what their flags may be."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from serving.ranks import free_port
from serving.workbench.bench.link.network import INTERFACE, Host
from serving.workbench.bench.server import process
from serving.workbench.bench.server.load import served_model
from serving.workbench.bench.server.requests import Server
from ubatch import ConfigError, nearest

_COMMON = ("--data-parallel-size=2", "--enable-expert-parallel", "--dtype=float32", "--no-enable-prefix-caching")
_VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}

_IDLE_S = 3.0


def _from(tokens: int) -> tuple[str, ...]:
    """Flags by which every step of so many tokens overlaps."""
    return f"--dbo-decode-token-threshold={tokens}", f"--dbo-prefill-token-threshold={tokens}"


ARMS: dict[str, tuple[str, ...]] = {
    "serial": (),
    "dbo": ("--enable-dbo",),
    "two-lanes": ("--enable-dbo", *_from(2)),
    "three-lanes": ("--enable-dbo", "--ubatch-size=3", *_from(3)),
    "single-batch": ("--enable-single-batch-overlap", *_from(1)),
    "two-by-two": ("--enable-dbo", "--enable-single-batch-overlap", *_from(2)),
}
"""Name -> flags. Where thresholds are given, every step that can overlap does."""


@dataclass(frozen=True)
class Arm:
    """A setting to compare: flags of both servers."""

    name: str
    flags: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Arm:
        """One of `ARMS`, or NAME=FLAGS. Raises ValueError."""
        if text in ARMS:
            return cls(text, ARMS[text])
        name, equals, flags = text.partition("=")
        if not (name and equals) or name.startswith("-"):
            raise ValueError(f"expected an arm, or NAME=FLAGS as in 'tuned=--config tuned.yaml'{nearest(text, ARMS)}")
        return cls(name, tuple(shlex.split(flags)))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Deployment:
    """Two servers that are ready: what a client needs, their processes, and the seconds that the start took."""

    server: Server
    processes: tuple[process.ServerProcess, process.ServerProcess]
    start_s: float


@contextmanager
def deployed(
    hosts: tuple[Host, Host], model: Path, flags: Sequence[str], *, start_s: float, timeout_s: float
) -> Iterator[Deployment]:
    """Both servers, each on its host's core, stopped after the block. Clients have to be on host 0.

    Raises:
        ServerFailed: they are not ready after `start_s` seconds; the message has the end of what both printed.
    """
    begin = time.perf_counter()
    with hosts[0].entered():
        port = free_port()
    shared = ["--nnodes=2", f"--master-addr={hosts[0].address}", f"--master-port={port}", *_COMMON, *flags]
    command = [*process.UBATCH, "serve", str(model), "--node-rank=1", *shared]
    with ExitStack() as stack:
        with hosts[1].pinned():
            second = stack.enter_context(process.started_server(command, environment=_VARIABLES))
        with hosts[0].pinned():
            try:
                first = stack.enter_context(
                    process.running_server(model, shared, environment=_VARIABLES, start_s=start_s)
                )
            except process.ServerFailed as error:
                raise process.ServerFailed(f"{error}\nand on host 1:\n{second.output()}") from None
            server = Server(first.base_url, stream=False, timeout_s=timeout_s)
            name = asyncio.run(served_model(server, None)).name
        yield Deployment(replace(server, model=name), (first, second), time.perf_counter() - begin)


class Servers:
    """The arms' servers: started for every visit, and stopped after it.

    Args:
        start: starts an arm's servers.
        kept: arms whose servers are started when a `with` block is entered, and run until it ends. Their memory is
            checked, and the CPU that they use while idle is printed.
    """

    def __init__(self, start: Callable[[Arm], AbstractContextManager[Deployment]], kept: Sequence[Arm]) -> None:
        self._start = start
        self._arms = kept
        self._kept: dict[str, Deployment] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for count, arm in enumerate(self._arms):
                before = available_memory()
                self._kept[arm.name] = stack.enter_context(self._start(arm))
                used, left = before - available_memory(), len(self._arms) - count - 1
                if used * left > available_memory():
                    raise ConfigError(
                        f"--live: the servers of an arm take {used / 2**30:.1f} GiB, and {left} arms more do not fit "
                        f"into the {available_memory() / 2**30:.1f} GiB left. Give fewer --arms, or leave out --live."
                    )
            if self._kept:
                self._say_idle()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    @contextmanager
    def of(self, arm: Arm) -> Iterator[Deployment]:
        """An arm's servers, ready, while all others rest."""
        if arm.name not in self._kept:
            with self._start(arm) as servers:
                yield servers
            return
        if not process.wait_for_rest(self._sessions()):
            print("idle servers still compute: what is measured meanwhile is too slow.", file=sys.stderr, flush=True)
        yield self._kept[arm.name]

    def _sessions(self) -> list[int]:
        return [each.process.pid for servers in self._kept.values() for each in servers.processes]

    def _say_idle(self) -> None:
        process.wait_for_rest(self._sessions())
        before = process.cpu_seconds(self._sessions())
        time.sleep(_IDLE_S)
        share = (process.cpu_seconds(self._sessions()) - before) / _IDLE_S
        print(f"arms kept: {len(self._kept)}; idle, their servers use {share:.1%} of a core", flush=True)


def available_memory() -> int:
    """Bytes that processes can still get."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
