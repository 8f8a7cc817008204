"""`ubatch bench link`: settings of overlap over a real link between two servers of one deployment.

    for every link, A B B A over the arms     start both servers, or go on with those that are kept (--live)
        for every load, --repeats times       send it; the same requests for every arm

An arm's two servers are in a network namespace each, on a core each, with one thread. What joins them is TCP over a
link with delay and rate, see `network`.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PlainSerializer

from serving.arguments.fields import Flag
from serving.progress import progress
from serving.ranks import free_port
from serving.workbench.bench.link import report
from serving.workbench.bench.link.network import INTERFACE, Host, Network, Probe, Speed, network, probe
from serving.workbench.bench.options import SERVER, Checkpoint, ReportOptions, ServeFlags
from serving.workbench.bench.server import process
from serving.workbench.bench.server.load import served_model
from serving.workbench.bench.server.offline import make_served_model
from serving.workbench.bench.server.requests import Server
from serving.workbench.bench.step_setting import RANDOM_MODELS, Random
from ubatch import ConfigError, nearest

# -- the servers -------------------------------------------------------------------------------------------------------


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
def deployed(options: Options, hosts: tuple[Host, Host], model: Path, arm: Arm) -> Iterator[Deployment]:
    """Both servers of an arm, each on its host's core, stopped after the block. Clients have to be on host 0.

    Raises:
        ServerFailed: they are not ready after `--start-s` seconds; the message has the end of what both printed.
    """
    flags = [*arm.flags, *shlex.split(options.serve_flags)]
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
                    process.running_server(model, shared, environment=_VARIABLES, start_s=options.start_s)
                )
            except process.ServerFailed as error:
                raise process.ServerFailed(f"{error}\nand on host 1:\n{second.output()}") from None
            server = Server(first.base_url, stream=False, timeout_s=options.timeout_s)
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


# -- the command -------------------------------------------------------------------------------------------------------


_AT_ONCE = 16


def _read(kind: Any) -> Any:
    return BeforeValidator(lambda value: kind.parse(value) if isinstance(value, str) else value)


_Text = PlainSerializer(str, when_used="json")
_Links = tuple[Annotated[Speed, _read(Speed), _Text], ...]
_Arms = tuple[Annotated[Arm, _read(Arm), _Text], ...]
_Loads = tuple[Annotated[report.Load, _read(report.Load), _Text], ...]


class Options(ReportOptions):
    """What to compare, over which links."""

    measures = (*SERVER, "serving/workbench/bench/link")

    model: Checkpoint | None = Field(
        None, description="folder of a Hugging Face checkpoint; random weights if not given"
    )
    random: Random = "qwen3-moe"
    links: Annotated[_Links, Flag(metavar="US:MBIT/S ...", default="0:0 100:2000 500:600 1000:200")] = Field(
        tuple(map(Speed.parse, ("0:0", "100:2000", "500:600", "1000:200"))),
        min_length=1,
        description="delay and rate each way; a rate of 0 is unlimited",
    )
    arms: Annotated[_Arms, Flag(metavar="ARM ...")] = Field(
        tuple(map(Arm.parse, ARMS)),
        min_length=1,
        description="the first is compared with; more by NAME=FLAGS, as 'tuned=--config a.yaml'",
    )
    loads: Annotated[_Loads, Flag(metavar="LOAD ...", default=" ".join(report.LOADS))] = Field(
        tuple(report.LOADS.values()), min_length=1, description="or PROMPTSxINxOUT"
    )
    blocks: int = Field(2, ge=1, description="A B B A blocks: two visits of every arm each")
    repeats: int = Field(2, ge=1, description="a visit sends each load that often")
    live: bool = Field(False, description="keep every arm's servers, in place of starting them for each visit")
    change: bool = Field(
        False,
        description="change from the first link to the second when half of the requests have ended; a load is then "
        f"sent --repeats times in one go, {_AT_ONCE} requests at a time",
    )
    serve_flags: ServeFlags = ""
    start_s: float = Field(300.0, gt=0, description="servers may take that long to start")
    timeout_s: float = Field(600.0, gt=0, description="a request may take that long")


def run(options: Options) -> int:
    """Measure, print and write; returns 1 if answers differ. What was measured before Ctrl-C is written, too.

    Raises:
        ConfigError: there can be no such network here, or the options do not fit together.
        ServerFailed: a server did not start.
        UBatchError: a request failed.
    """
    _check(options)
    results: list[dict[str, Any]] = []
    with signals_end_it(), ExitStack() as stack:
        joined = stack.enter_context(network())
        model = options.model
        if model is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model = make_served_model(Path(folder), RANDOM_MODELS[options.random]())
        stack.callback(options.write, {"links": results})
        stack.enter_context(joined.hosts[0].entered())
        joined.link.set(options.links[0])
        start = partial(deployed, options, joined.hosts, model)
        servers = stack.enter_context(Servers(start, options.arms if options.live else ()))
        bench = _Bench(options, joined, model, servers)
        for speeds in [options.links] if options.change else [(speed,) for speed in options.links]:
            results.append({})
            bench.measure(speeds, results[-1])
    figures = [own for link in results for load in link["loads"].values() for own in load.values()]
    different = sum(own.same < own.requests for own in figures)
    if different:
        print(f"{different} of {len(figures)} arms and loads have answers that differ.", file=sys.stderr)
    return 1 if different else 0


def _check(options: Options) -> None:
    if options.change and len(options.links) != 2:
        raise ConfigError("--change takes two links: --links 500:600 1000:200 changes from the first to the second.")
    for name, given in (("--arms", options.arms), ("--loads", options.loads)):
        if len({each.name for each in given}) < len(given):
            raise ConfigError(f"{name}: every name may be given once.")
    if options.model is not None:
        config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
        for load in options.loads:
            if load.longest > config.get("max_position_embeddings", load.longest):
                raise ConfigError(
                    f"--loads {load.name} has {load.longest} tokens in a request, more than the model takes."
                )


@contextmanager
def signals_end_it() -> Iterator[None]:
    """SIGTERM, SIGHUP and Ctrl-C raise; while the run cleans up after the first, further ones are ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, end) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class _Bench:
    """What all visits share."""

    options: Options
    network: Network
    model: Path
    servers: Servers

    def measure(self, speeds: Sequence[Speed], result: dict[str, Any]) -> None:
        """All arms and loads over a link, or over one that changes to a second speed. `result` gets the figures, and
        the runs as they come."""
        options = self.options
        probes = [self._probe(speed) for speed in speeds[::-1]][::-1]
        runs: dict[str, dict[str, list[report.Run]]] = {
            load.name: {arm.name: [] for arm in options.arms} for load in options.loads
        }
        start_s: dict[str, list[float]] = {arm.name: [] for arm in options.arms}
        result |= {"link": list(map(str, speeds)), "probes": probes, "start_s": start_s, "runs": runs, "loads": {}}
        for _ in progress(range(options.blocks), desc="blocks"):
            for arm in (*options.arms, *options.arms[::-1]):
                self.network.link.set(speeds[0])
                with self.servers.of(arm) as servers:
                    start_s[arm.name].append(servers.start_s)
                    for load in options.loads:
                        runs[load.name][arm.name] += self._send(load, servers.server, speeds)
        repeats = 1 if options.change else options.repeats
        for load in options.loads:
            result["loads"][load.name] = report.figures_by_arm(runs[load.name], repeats, changed=options.change)
            report.print_load(load, result["loads"][load.name], start_s)
        result["pooled"] = report.pooled(result["loads"])
        report.print_pooled(result["loads"])

    def _probe(self, speed: Speed) -> Probe:
        self.network.link.set(speed)
        found = probe(self.network.hosts, speed)
        print(f"\nlink of {speed}: measured {found}", flush=True)
        return found

    def _send(self, load: report.Load, server: Server, speeds: Sequence[Speed]) -> list[report.Run]:
        """A load's runs of one visit."""
        tasks, repeats, at_once = load.tasks(self.model), self.options.repeats, load.at_once
        asyncio.run(report.send_load(server, report.warm_up(tasks), None))
        if self.options.change:  # one long run, in which requests end all the time
            tasks, repeats, at_once = [*tasks] * repeats, 1, at_once or _AT_ONCE
        found, half_done = [], partial(self.network.link.set, speeds[-1])
        for _ in range(repeats):
            self.network.link.set(speeds[0])
            found.append(asyncio.run(report.send_load(server, tasks, at_once, half_done)))
        return found
