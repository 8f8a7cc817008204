"""The part of `ubatch bench faults` that kills engines while requests run, in several configurations of a server."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serving.workbench.bench.faults import shared
from serving.workbench.bench.faults.referee import Tally, Verdict
from serving.workbench.bench.server.load import read_metrics
from serving.workbench.bench.server.process import Ended, Subject, by_reason
from serving.workbench.bench.server.requests import Server
from serving.workbench.bench.statistics import table

_LOOK_S = 0.2
_BETWEEN_S = (0.3, 2.0)
"""Shortest and longest time from a server that is healthy to the next kill, in seconds."""
_ALONE_S, _SIGNS_S = 2.0, 60.0
"""Shortest and longest time before the first kill, in seconds."""
CONFIGURATIONS: Mapping[str, tuple[str, ...]] = {
    "one rank": (),
    "DP 2, EP, DBO": (*shared.EXPERT_PARALLEL, *shared.LANES),
    "TP 2": ("--tensor-parallel-size=2", "--enable-expert-parallel"),
    "ngram drafts": ("--speculative-algorithm=ngram",),
    "tiny KV, prefix cache": ("--max-model-len=512", "--kv-cache-memory=3M"),
}
"""Name -> flags of the server."""
SHOWN: Mapping[str, str] = {
    "DP 2, EP, DBO": "overlapped",
    "ngram drafts": "accepted",
    "tiny KV, prefix cache": "preempted",
}
"""Name -> what must have happened there before anything is killed."""
_SIGNS = {
    "ubatch:steps_total": "overlapped",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:num_preemptions_total": "preempted",
}
"""Metric -> steps that overlapped, drafted tokens that were accepted, requests that were retracted."""


async def read_signs(server: Server) -> Counter[str]:
    """What a server has done so far, by the names in `_SIGNS`: from `/metrics`."""
    signs = Counter(dict.fromkeys(_SIGNS.values(), 0))
    for sample in await read_metrics(server):
        if sample.name in _SIGNS and sample.labels.get("outcome", "engaged").startswith("engaged"):
            signs[_SIGNS[sample.name]] += int(sample.value)
    return signs


@dataclass(frozen=True)
class Killed:
    """What came of a configuration.

    Attributes:
        restarts: by reason, and `resumed` requests, from `/metrics`.
        signs: what the server did before anything was killed.
        unhealthy: why the kills had to end early; None if they had not.
    """

    name: str
    kills: int
    seconds: float
    answers: Tally
    restarts: Mapping[str, int]
    signs: Mapping[str, int]
    ended: Ended
    unhealthy: str | None

    def faults(self, *, exact: bool) -> list[str]:
        sign = SHOWN.get(self.name)
        found = [self.unhealthy] if self.unhealthy else []
        if sign is not None and not self.signs[sign]:
            found.append(f"nothing was {sign}: another configuration is needed to show anything")
        found += shared.faults_of_answers(self.answers, exact=exact)
        if self.unhealthy is None:
            found += shared.faults_of_restarts(self.restarts, self.kills)
        found += shared.faults_of_end(self.ended)
        return [f"kill, {self.name}: {each}" for each in found]


def run_kills(setting: shared.Setting) -> shared.Found:
    """Kill engines in every configuration; prints each when it ends."""
    done, faults = [], []
    for name, flags in list(CONFIGURATIONS.items())[: 1 if setting.options.quick else None]:
        with setting.server(shared.UNLIMITED, *flags) as subject:
            killed = asyncio.run(_kill(setting, subject, name))
        done.append(killed)
        faults += killed.faults(exact=setting.exact)
        _print(done[-1:], head=len(done) == 1)
    return shared.Found(done, faults)


async def _kill(setting: shared.Setting, subject: Subject, name: str) -> Killed:
    rng, unhealthy = random.Random(name), None
    async with shared.running_load(subject, setting.requests, setting.options.streams) as load:
        signs = await _wait_for_signs(subject.server, SHOWN.get(name))
        begun = time.monotonic()
        try:
            await shared.kill_engines(
                subject, load, setting.options.kills, rng, between_s=_BETWEEN_S, again_s=shared.AGAIN_S
            )
        except shared.NotHealthy as error:
            unhealthy = str(error)
        seconds = time.monotonic() - begun
    answers = await setting.referee.tally(load.cases(setting.references))
    restarts = dict(await subject.restarts())
    return Killed(name, load.kills, seconds, answers, restarts, signs, subject.end(), unhealthy)


async def _wait_for_signs(server: Server, wanted: str | None) -> Counter[str]:
    """What the server has done after a while: until the sign that is wanted shows."""
    begun = time.monotonic()
    await asyncio.sleep(_ALONE_S)
    signs = await read_signs(server)
    while wanted is not None and not signs[wanted] and time.monotonic() - begun < _SIGNS_S:
        await asyncio.sleep(_LOOK_S)
        signs = await read_signs(server)
    return signs


def _print(done: Sequence[Killed], *, head: bool) -> None:
    names = ("kills", "s", "restarts", "resumed", "requests", *(each.value for each in Verdict), "left over")
    rows = []
    for each in done:
        counts = [each.answers.counts[verdict] for verdict in Verdict]
        restarts = sum(by_reason(each.restarts).values())
        resumed = each.restarts.get("resumed", 0)
        left = len(each.ended.processes) + len(each.ended.files)
        rows.append(
            (each.name.ljust(24), each.kills, each.seconds, restarts, resumed, each.answers.requests, *counts, left)
        )
    lines = table(dict.fromkeys(("".ljust(24), *(each.rjust(9) for each in names)), "9.0f"), rows).splitlines()
    print("\n".join(lines if head else lines[1:]), flush=True)
