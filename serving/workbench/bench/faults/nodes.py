"""The part of `ubatch bench faults` with two machines: network namespaces that a link joins, which can be cut.

rank         a rank of the second machine is killed; its launcher stays
launcher     the second machine's launcher is killed with all its processes, and started again
cut, healed  the link loses everything for longer than `--timeout-s`; the second launcher is started again if it ends
cut          the same for ever: both launchers end by themselves, and name the other machine
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from serving.ranks import free_port
from serving.workbench.bench.faults import shared
from serving.workbench.bench.faults.answers import Answer, Asked
from serving.workbench.bench.link.network import INTERFACE, Network, network
from serving.workbench.bench.server.process import (
    UBATCH,
    ServerProcess,
    Subject,
    by_reason,
    end_group,
    pids_of,
    runs,
    started_server,
    subject,
)
from serving.workbench.bench.statistics import table
from ubatch import ConfigError

_STREAMS = 16
_PROGRESS_S = 1.5
_BACK_S = 2.0
"""The second machine is gone for so many seconds."""
_LOOK_S = 0.05
_MOST_SILENCES = 3
_PATIENT = 4
"""The time-out is so many times longer where a machine is to come back: it has so long to start its launcher."""
Case = tuple[Asked, Answer, Answer]


@dataclass
class _Second:
    """The second machine: its launcher, which can be started again.

    Attributes:
        logs: what each of its launchers has printed.
    """

    joined: Network
    command: Sequence[str]
    folder: str
    stack: ExitStack
    logs: list[ServerProcess] = field(default_factory=list)

    def start(self) -> None:
        variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "TMPDIR": self.folder}
        with self.joined.hosts[1].entered():
            self.logs.append(self.stack.enter_context(started_server(self.command, environment=variables)))

    @property
    def launcher(self) -> ServerProcess:
        return self.logs[-1]

    def ranks(self) -> list[int]:
        """Process ids of its ranks."""
        group = self.launcher.process.pid
        return [pid for pid in pids_of([group]) if pid != group and runs(pid)]


@dataclass(frozen=True)
class Cut:
    """One fault of two machines.

    Attributes:
        again_s: until the server was healthy again; None if it was not.
        restarts: counted by `/metrics`.
    """

    name: str
    again_s: float | None
    restarts: int


def run_nodes(setting: shared.Setting) -> shared.Found:
    """All faults; skipped, by name, where this user cannot have namespaces."""
    try:
        with network() as joined:
            healed, cases, faults = _healed(setting, joined)
            ended_s, said, more = _not_healed(setting, joined)
    except ConfigError as error:
        print(f"  skipped: {error}", flush=True)
        return shared.Found({"skipped": str(error)})
    tally = asyncio.run(setting.referee.tally(cases))
    faults = [*faults, *shared.faults_of_answers(tally, exact=setting.exact), *more]
    rows = [(each.name, each.again_s, str(each.restarts)) for each in healed]
    print(table({"": "", "healthy again, s": ".1f", "restarts": ""}, rows))
    print("  " + ", ".join(f"{count} {name}" for name, count in tally.counts.items()))
    both = f"both ended after {ended_s:.1f} s" if ended_s else "not both ended"
    print(f"  cut for ever: {both}", flush=True)
    figures = {"healed": healed, "answers": tally, "ended_s": ended_s, "said": said}
    return shared.Found(figures, [f"nodes: {each}" for each in faults])


@contextmanager
def _two_machines(setting: shared.Setting, joined: Network, timeout_s: float) -> Iterator[tuple[Subject, _Second]]:
    """A server with a rank on each machine; the block runs on the first."""
    first = joined.hosts[0]
    with first.entered(), ExitStack() as stack:
        common = ["--nnodes=2", f"--master-addr={first.address}", f"--master-port={free_port()}", shared.UNLIMITED]
        common += [f"--timeout-s={timeout_s}", *shared.EXPERT_PARALLEL]
        command = [*UBATCH, "serve", str(setting.options.model), "--node-rank=1", *common, *setting.options.flags]
        second = _Second(joined, command, "/tmp", stack)
        second.start()
        flags = [*common, *setting.options.flags]
        server = stack.enter_context(subject(setting.options.model, flags, variables={"GLOO_SOCKET_IFNAME": INTERFACE}))
        yield server, second


def _healed(setting: shared.Setting, joined: Network) -> tuple[list[Cut], list[Case], list[str]]:
    with _two_machines(setting, joined, _PATIENT * setting.options.timeout_s) as (server, second):
        done, cases = asyncio.run(_disturb(setting, server, second))
        ended = server.end()
    faults = [f"{each.name}: the server did not come back" for each in done if each.again_s is None]
    return done, cases, faults + shared.faults_of_end(ended)


async def _disturb(setting: shared.Setting, server: Subject, second: _Second) -> tuple[list[Cut], list[Case]]:
    done: list[Cut] = []
    async with shared.running_load(server, setting.requests, _STREAMS) as load:
        for name in ("rank", "launcher", "cut, healed"):
            if await server.wait_healthy(shared.AGAIN_S) is None:
                break
            await asyncio.sleep(_PROGRESS_S)
            before = await server.restarts()
            begun = time.monotonic()
            await _harm(name, setting, server, second)
            await _serves_again(server, second, load, begun)
            again_s = await server.wait_healthy(shared.AGAIN_S)
            took_s = None if again_s is None else time.monotonic() - begun
            restarts = by_reason(await server.restarts() - before)
            done.append(Cut(name, took_s, sum(restarts.values())))
    return done, load.cases(setting.references)


async def _harm(name: str, setting: shared.Setting, server: Subject, second: _Second) -> None:
    """Do it; returns when it is over."""
    link = second.joined.link
    if name == "rank":
        if ranks := second.ranks():
            shared.kill(random.Random(0).choice(ranks))
    elif name == "launcher":
        os.killpg(second.launcher.process.pid, signal.SIGKILL)
        end_group(second.launcher.process)
        await asyncio.sleep(_BACK_S)
        second.start()
    else:
        link.cut()
        await asyncio.sleep(1.5 * _PATIENT * setting.options.timeout_s)
        link.cut(cut=False)


async def _serves_again(server: Subject, second: _Second, load: shared.Load, begun: float) -> None:
    """Wait until something new has come in every stream; a launcher that has ended is started again meanwhile."""
    streams = [times for times, asked in zip(load.times, load.requests, strict=False) if asked.stream]
    while server.alive and time.monotonic() - begun < shared.AGAIN_S:
        if second.launcher.process.poll() is not None:
            second.start()
        if (
            all(times and times[-1] > begun + _BACK_S for times in streams)
            and await server.wait_healthy(1.0) is not None
        ):
            return
        await asyncio.sleep(_LOOK_S)


def _not_healed(setting: shared.Setting, joined: Network) -> tuple[float | None, list[str], list[str]]:
    """Cut the link for ever: seconds until both have ended, their last lines, and the faults."""
    most_s = _MOST_SILENCES * setting.options.timeout_s
    with _two_machines(setting, joined, setting.options.timeout_s) as (server, second):
        asyncio.run(_load_for(server, setting.requests, _PROGRESS_S))
        joined.link.cut()
        begun = time.monotonic()
        both = (server.process.process, second.launcher.process)
        while any(each.poll() is None for each in both) and time.monotonic() - begun < most_s + shared.AGAIN_S:
            time.sleep(_LOOK_S)
        ended_s = time.monotonic() - begun if all(each.poll() is not None for each in both) else None
        joined.link.cut(cut=False)
        said = [(each.strip().splitlines() or [""])[-1] for each in (server.log(), second.launcher.output())]
        status = [each.poll() for each in both]
        left = server.end()
    broken = {
        f"the cut link was not named within {most_s:g} s, but after {ended_s}": ended_s is None or ended_s > most_s,
        f"the first machine says {said[0]!r}": "node 1" not in said[0],
        f"the second machine says {said[1]!r}": "node 0" not in said[1],
        f"they ended with {status}": status != [1, 1],
        f"processes were left over: {left.processes}": left.processes,
    }
    return ended_s, said, [f"cut for ever: {what}" for what, is_so in broken.items() if is_so]


async def _load_for(server: Subject, requests: Sequence[Asked], seconds: float) -> None:
    async with shared.running_load(server, requests, _STREAMS, wait=False):
        await asyncio.sleep(seconds)
