"""The parts of `ubatch bench faults` that measure: how long a stream stands still, what restarts cost a server where
nothing fails, and what grows in the API process."""

import asyncio
import calendar
import math
import random
import re
import tempfile
import time
import timeit
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median

from serving.engine.kept import SharedMemory, StepRecord
from serving.workbench.bench.faults import shared
from serving.workbench.bench.faults.answers import Asked
from serving.workbench.bench.faults.referee import Tally
from serving.workbench.bench.server.load import token_pool
from serving.workbench.bench.server.offline import make_served_model
from serving.workbench.bench.server.process import Footprint, Subject, cpu_seconds, footprint, subject, wait_for_rest
from serving.workbench.bench.server.requests import GREEDY, greedy_tasks, send_and_check
from serving.workbench.bench.statistics import bootstrap, interleave_arms, on_cores, paired, split_cores, table
from ubatch import UBatchError

_MOST_PAUSE, _LEAST_THROUGHPUT = 0.5, 0.99
_STREAMS, _STREAM_TOKENS, _COLD_STARTS = 8, 3000, 5
_ERROR = re.compile(r"^(\S+ \S+)\.(\d{3}) ERROR +api ", re.MULTILINE)
_SETTLE_S = 2.0
_LOOK_S = 0.01
_FEW = 16
_COST_REQUESTS, _COST_TOKENS, _PAIRS, _RECORDS = 64, 64, 4, 200
_PROCESSOR = ", processor"
_ON, _OFF = "--max-engine-restarts=3", "--max-engine-restarts=0"


@dataclass(frozen=True)
class Pause:
    """A kill, in seconds.

    Attributes:
        noticed: from the kill until the API process logged it.
        streams: from then to the next token, of each stream.
    """

    noticed: float
    streams: Sequence[float]


def run_pause(setting: shared.Setting) -> shared.Found:
    """Kill a rank of a server of two ranks with 100 million parameters; compare with its own start."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_served_model(Path(folder))
        flags = [*setting.options.flags, *shared.EXPERT_PARALLEL, shared.UNLIMITED, "--kv-cache-memory=512M"]
        starts_s = []
        for _ in range(min(_COLD_STARTS, setting.options.pauses) - 1):
            with subject(model, flags) as server:
                starts_s.append(server.start_s)
        with subject(model, flags) as server:
            starts_s.append(server.start_s)
            pauses = asyncio.run(_pauses(server, setting.options.pauses))
            ended = server.end()
    every, last = ([of(each.streams) for each in pauses] for of in (median, max))
    ratio = median(every) / median(starts_s)
    print(f"  start to healthy     {bootstrap(starts_s):.2f} s, {len(starts_s)} starts")
    print(f"  noticed after        {bootstrap([each.noticed for each in pauses]):.2f} s, {len(pauses)} kills")
    print(f"  then to the next token {bootstrap(every):.2f} s; the last stream's {median(last):.2f} s")
    print(f"  of a start           {ratio:.2f}", flush=True)
    faults = [f"a stream stands still for {ratio:.2f} of a start"] if ratio > _MOST_PAUSE else []
    figures = {"starts_s": starts_s, "pauses": pauses, "ratio": ratio}
    return shared.Found(figures, [f"pause: {each}" for each in [*faults, *shared.faults_of_end(ended)]])


async def _pauses(server: Subject, count: int) -> list[Pause]:
    pool, rng = await token_pool(server.server), random.Random(0)
    fields = {"max_tokens": _STREAM_TOKENS, **GREEDY}
    requests = [Asked("plain", tuple(rng.choices(pool, k=16)), True, fields) for _ in range(_STREAMS)]
    found = []
    async with shared.running_load(server, requests, len(requests), wait=False) as load:
        for _ in range(count):
            if await server.wait_healthy(shared.AGAIN_S) is None:
                raise UBatchError("the server is not healthy again, so that no pause can be measured.")
            await _wait_for_tokens(load, time.monotonic())
            await asyncio.sleep(_SETTLE_S)
            found.append(await _pause(server, load, rng))
    return found


async def _pause(server: Subject, load: shared.Load, rng: random.Random) -> Pause:
    killed = time.time()
    since = time.monotonic()
    shared.kill(rng.choice(list(server.engines().values())))
    noticed: float | None = None
    while noticed is None and time.time() - killed < shared.AGAIN_S:
        await asyncio.sleep(_LOOK_S)
        noticed = next((each for each in errors_at(server.log()) if each > killed - 0.001), None)
    if noticed is None:
        raise UBatchError("the API process logs no error after a rank was killed.")
    at = since + (noticed - killed)
    return Pause(noticed - killed, [after - at for after in await _wait_for_tokens(load, at)])


def errors_at(log: str) -> list[float]:
    """When the API process logged errors, in seconds of `time.time()`: stamps in a log are UTC."""
    pairs = _ERROR.findall(log)
    return [calendar.timegm(time.strptime(at, "%Y-%m-%d %H:%M:%S")) + int(ms) / 1e3 for at, ms in pairs]


async def _wait_for_tokens(load: shared.Load, since: float) -> list[float]:
    """Wait until every stream has got something after this time; returns when the first came, of each."""
    deadline = time.monotonic() + shared.AGAIN_S
    while (first := tokens_after(load.times, since)) is None:
        if time.monotonic() > deadline:
            raise UBatchError(f"a stream got nothing for {shared.AGAIN_S:g} s.")
        await asyncio.sleep(_LOOK_S)
    return first


def tokens_after(streams: Sequence[Sequence[float]], since: float) -> list[float] | None:
    """The first time after `since` of each stream, whose times are sorted; None if one has none yet."""
    places = [bisect_right(times, since) for times in streams]
    if any(place == len(times) for place, times in zip(places, streams, strict=True)):
        return None
    return [times[place] for place, times in zip(places, streams, strict=True)]


# -- throughput when nothing fails


def run_cost(setting: shared.Setting) -> shared.Found:
    """Pairs of servers, one of which may restart its engines; one server at a time has a load, in turns A B B A.

    All processes of a server share a core, and the client has the others: what restarts cost in any of them makes the
    server slower, and no threads wait for each other. A turn scatters by 15% on a shared machine, so there are many of
    them. What restarts add to every step, its record, is timed alone, too.
    """
    found: dict[str, list[float]] = defaultdict(list)
    arms = [("on", _ON), ("off", _OFF)]
    pairs = min(_PAIRS, setting.options.blocks)
    blocks = math.ceil(setting.options.blocks / pairs)
    for pair in range(pairs):
        for name, values in _pair(setting, dict(arms if pair % 2 else arms[::-1]), blocks).items():
            found[name] += values
    ratio = paired(found["off"], found["on"])
    processor = paired(found[f"on{_PROCESSOR}"], found[f"off{_PROCESSOR}"])
    tokens, record_s = _COST_REQUESTS * _COST_TOKENS, time_record(_COST_REQUESTS)
    step_s = median(found["off"]) / _COST_TOKENS
    for name in ("on", "off"):
        print(f"  {name:4} {bootstrap([tokens / each for each in found[name]]):.0f} tokens/s")
    print(f"  throughput, on over off                {ratio:.3f}, {len(found['on'])} blocks")
    print(f"  the server's processor time, likewise  {processor:.3f}")
    record = f"{1e6 * record_s:.1f} us, {record_s / step_s:.2%} of a step"
    print(f"  a step's record, alone                 {record}", flush=True)
    fault = f"cost: throughput with restarts is {ratio:.3f} of that without"
    figures = {"seconds": found, "ratio": ratio, "processor": processor, "record_s": record_s, "step_s": step_s}
    return shared.Found(figures, [fault] if ratio.median < _LEAST_THROUGHPUT else [])


def _pair(setting: shared.Setting, flags: Mapping[str, str], blocks: int) -> Mapping[str, list[float]]:
    """Seconds of a turn, by server, and those of processors; a mean of two for each block."""
    one, others = split_cores()
    with ExitStack() as stack:
        with on_cores(one):
            servers = {
                name: stack.enter_context(setting.server(flag, "--no-enable-prefix-caching"))
                for name, flag in flags.items()
            }
        stack.enter_context(on_cores(others))
        pool = asyncio.run(token_pool(servers["on"].server))
        rng = random.Random(0)
        prompts = [rng.choices(pool, k=32) for _ in range(_COST_REQUESTS)]
        sessions = [each.pid for each in servers.values()]
        arms = {name: partial(_visit, name, each, prompts, sessions) for name, each in servers.items()}
        return interleave_arms(arms, blocks)


def _visit(name: str, server: Subject, prompts: list[list[int]], sessions: list[int]) -> dict[str, float]:
    wait_for_rest(sessions)
    used, begun = cpu_seconds([server.pid]), time.perf_counter()
    asyncio.run(send_and_check(server.server, greedy_tasks(prompts, _COST_TOKENS)))
    return {name: time.perf_counter() - begun, f"{name}{_PROCESSOR}": cpu_seconds([server.pid]) - used}


def time_record(requests: int) -> float:
    """Seconds that the record of a step with so many requests, others than before, takes its rank: a median."""
    with closing(SharedMemory("ubatch-record")) as memory:
        record = StepRecord(memory)
        ids = cycle([[f"cmpl-{number:032x}-0" for number in range(first, first + requests)] for first in range(3)])

        def step() -> None:
            record.begin(next(ids))
            record.end()

        return median(timeit.repeat(step, number=_RECORDS, repeat=25)) / _RECORDS


# -- what grows


def run_soak(setting: shared.Setting) -> shared.Found:
    """Kill a rank again and again; what the API process holds must not grow."""
    with setting.server(shared.UNLIMITED, *shared.EXPERT_PARALLEL) as server:
        series, kills, tally = asyncio.run(_soak(setting, server))
        ended = server.end()
    rows = [(str(number), each.resident / 1e6, each.descriptors, each.threads) for number, each in enumerate(series, 1)]
    print(table({"after kill": "", "MB": ".1f", "descriptors": "d", "threads": "d"}, rows))
    for name in ("resident", "descriptors", "threads"):
        line = shared.trend([float(getattr(each, name)) for each in series])
        if line is not None:
            print(f"  {name}: {line.growth:+.3g} [{line.low:+.3g}, {line.high:+.3g}] over all")
    faults = [
        *shared.faults_of_series(series),
        *shared.faults_of_answers(tally, exact=setting.exact),
        *shared.faults_of_end(ended),
    ]
    if len(series) < kills:
        faults.append(f"the server came back after {len(series)} of {kills} kills")
    figures = {"series": series, "kills": kills, "answers": tally}
    return shared.Found(figures, [f"soak: {each}" for each in faults])


async def _soak(setting: shared.Setting, server: Subject) -> tuple[list[Footprint], int, Tally]:
    """What the API process holds, shortly before each kill but the first."""
    rng, series, options = random.Random(1), [], setting.options
    ends = time.monotonic() + 60 * options.minutes
    async with shared.running_load(server, setting.requests, _FEW) as load:
        await asyncio.sleep(_SETTLE_S)
        while time.monotonic() < ends and server.alive:
            if engines := list(server.engines().values()):
                load.kills += shared.kill(rng.choice(engines))
            await asyncio.sleep(options.every_s)
            if await server.wait_healthy(shared.AGAIN_S) is None:
                break
            series.append(footprint(server.pid))
    return series, load.kills, await setting.referee.tally(load.cases(setting.references))
