"""The parts of `ubatch bench faults` in which the ranks of one machine fail while requests run: kills, in several
configurations of a server; other faults, ranks that hang and steps that fail; and engines that fail too often, by a
request that kills them, and by chance."""

import asyncio
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from serving.workbench.bench.faults import shared
from serving.workbench.bench.faults.answers import Answer, Asked, ask_all
from serving.workbench.bench.faults.faulty import FOLDER, PROGRAM
from serving.workbench.bench.faults.referee import Tally, Verdict
from serving.workbench.bench.server.load import read_metrics
from serving.workbench.bench.server.process import Ended, Subject, by_reason
from serving.workbench.bench.server.requests import Server
from serving.workbench.bench.statistics import table
from ubatch import UBatchError

# -- kills -------------------------------------------------------------------------------------------------------------


_SIGNS_LOOK_S = 0.2
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
        await asyncio.sleep(_SIGNS_LOOK_S)
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


# -- other faults ------------------------------------------------------------------------------------------------------


_PROGRESS_S = 1.0
_LOOK_S = 0.02
_NOTICED_LATER_S = 10.0


@dataclass(frozen=True)
class Disturbed:
    """One fault, and what the server made of it.

    Attributes:
        happened: whether it could be done.
        noticed_s: until `/health` answered 503; None if it did not.
        again_s: from then until it answered 200.
        restarts: by reason, of this fault.
    """

    name: str
    happened: bool
    noticed_s: float | None
    again_s: float | None
    restarts: Mapping[str, int]

    def faults(self, timeout_s: float) -> list[str]:
        """Faults on a server with that `--timeout-s`."""
        broken = {
            "could not be done": not self.happened,
            "/health never told it": self.happened and self.noticed_s is None,
            f"the server did not come back within {shared.AGAIN_S:g} s": self.noticed_s is not None
            and self.again_s is None,
            f"it was noticed after {self.noticed_s or 0:.1f} s": (self.noticed_s or 0) > timeout_s + _NOTICED_LATER_S,
        }
        return [f"others, {self.name}: {what}" for what, is_so in broken.items() if is_so]


def run_others(setting: shared.Setting) -> shared.Found:
    """One server of two ranks that overlap; the faults come one after the other while requests run."""
    flags = (shared.UNLIMITED, f"--timeout-s={setting.options.timeout_s}", *shared.EXPERT_PARALLEL, *shared.LANES)
    with (
        tempfile.TemporaryDirectory() as folder,
        setting.server(*flags, program=PROGRAM, variables={FOLDER: folder}) as subject,
    ):
        done, tally, restarts = asyncio.run(_disturb(setting, subject, Path(folder)))
        ended = subject.end()
    faults = [fault for each in done for fault in each.faults(setting.options.timeout_s)]
    found = shared.faults_of_answers(tally, exact=setting.exact) + shared.faults_of_restarts(restarts, 10 * len(done))
    found += shared.faults_of_end(ended)
    faults += [f"others: {each}" for each in found]
    _print_disturbed(done, tally)
    return shared.Found({"faults": done, "answers": tally, "ended": ended}, faults)


async def _disturb(
    setting: shared.Setting, subject: Subject, folder: Path
) -> tuple[list[Disturbed], Tally, dict[str, int]]:
    ways: dict[str, Callable[[], Awaitable[bool]]] = {
        "SIGSTOP": partial(_stop_rank, subject),
        "exception inside a step": partial(_tell, subject, folder / "raise"),
        "out of memory inside a step": partial(_tell, subject, folder / "memory"),
        "exception inside a lane": partial(_tell, subject, folder / "lane"),
    }
    done = []
    async with shared.running_load(subject, setting.requests, setting.options.streams) as load:
        for name, way in ways.items():
            if await subject.wait_healthy(shared.AGAIN_S) is None:
                break
            await asyncio.sleep(_PROGRESS_S)
            before, begun = await subject.restarts(), time.monotonic()
            health = asyncio.create_task(subject.wait_sick(setting.options.timeout_s + shared.AGAIN_S))
            happened = await way()
            noticed_s = await health if happened else None
            health.cancel()
            again_s = None if noticed_s is None else await subject.wait_healthy(shared.AGAIN_S)
            restarts = by_reason(await subject.restarts() - before)
            done.append(Disturbed(name, happened, noticed_s, again_s, restarts))
            if subject.alive and time.monotonic() - begun < _PROGRESS_S:
                await asyncio.sleep(_PROGRESS_S)
    tally = await setting.referee.tally(load.cases(setting.references))
    return done, tally, dict(await subject.restarts())


async def _stop_rank(subject: Subject) -> bool:
    engines = list(subject.engines().values())
    return bool(engines) and shared.kill(random.Random(0).choice(engines), signal.SIGSTOP)


async def _tell(subject: Subject, order: Path) -> bool:
    """Leave an order for the engines; whether one of them has taken it."""
    order.touch()
    deadline = time.monotonic() + shared.AGAIN_S / 2
    while order.exists() and subject.alive and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
    taken = not order.exists()
    order.unlink(missing_ok=True)
    return taken


def _print_disturbed(done: list[Disturbed], tally: Tally) -> None:
    head: dict[str, str] = {"": "", "noticed, s": ".1f", "healthy again, s": ".1f", "restarts": ""}
    rows: list[tuple[Any, ...]] = []
    for each in done:
        reasons = ", ".join(f"{count} {reason}" for reason, count in each.restarts.items() if count)
        rows.append((each.name, each.noticed_s, each.again_s, reasons or "-"))
    print(table(head, rows))
    print("  " + ", ".join(f"{count} {name}" for name, count in tally.counts.items()), flush=True)


# -- a request that kills ----------------------------------------------------------------------------------------------


_CODE = "poisonous_request"
_DEFAULT_RESTARTS = 3
_LIMIT_BETWEEN_S = (0.3, 1.0)
_AGAIN_S = 60.0
_FEW = 8
_WAYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "raises, one rank": ("raise", ()),
    "raises, DP 2": ("raise", shared.EXPERT_PARALLEL),
    "segfaults, DP 2": ("segfault", shared.EXPERT_PARALLEL),
}


@dataclass(frozen=True)
class Poisoned:
    """What came of a request that kills engines, and of the others beside it."""

    name: str
    seconds: float
    status: int | None
    code: str | None
    error: str | None
    others: Tally
    restarts: Mapping[str, int]
    ended: Ended

    def faults(self, *, exact: bool) -> list[str]:
        broken = {
            "the poisonous request was answered": self.error is None,
            f"it ended with {self.error}, code {self.code}": self.error is not None and self.code != _CODE,
            f"it ended with HTTP status {self.status}": self.error is not None and self.status != 500,
        }
        found = [what for what, is_so in broken.items() if is_so]
        found += shared.faults_of_answers(self.others, exact=exact) + shared.faults_of_end(self.ended)
        return [f"poison, {self.name}: {each}" for each in found]


def run_poison(setting: shared.Setting) -> shared.Found:
    """A request that ends an engine in every step that has it, among others; with the default limits of restarts."""
    done, faults = [], []
    for name, (how, flags) in _WAYS.items():
        stream = how == "segfault"
        with tempfile.TemporaryDirectory() as folder:
            token = _unused_token(setting)
            (Path(folder) / "poison").write_text(f"{token} {how}")
            with setting.server(*flags, program=PROGRAM, variables={FOLDER: folder}) as subject:
                poisoned = asyncio.run(_ask_with(setting, subject, name, token, stream=stream))
        done.append(poisoned)
        faults += poisoned.faults(exact=setting.exact)
    _print_poisoned(done)
    return shared.Found(done, faults)


async def _ask_with(setting: shared.Setting, subject: Subject, name: str, token: int, *, stream: bool) -> Poisoned:
    """Send all requests, one of them poisoned, at once."""
    requests = list(setting.requests[: setting.options.streams])
    place = len(requests) // 2
    poisonous = Asked("poisonous", (*requests[place].prompt, token), stream, {"max_tokens": 20, "temperature": 0})
    requests[place] = poisonous
    begun = time.monotonic()
    answers = await asyncio.wait_for(ask_all(subject.server, requests), 10 * _AGAIN_S)
    seconds = time.monotonic() - begun
    cases = list(zip(requests, setting.references[: setting.options.streams], answers, strict=True))
    del cases[place]
    told, restarts = answers[place], dict(await subject.restarts())
    others = await setting.referee.tally(cases)
    return Poisoned(name, seconds, told.status, told.code, told.error, others, restarts, subject.end())


def _unused_token(setting: shared.Setting) -> int:
    """A token that no request has, and that none is answered with."""
    used = {token for asked in setting.requests for token in asked.prompt}
    used |= {token for answer in setting.references for choice in answer.choices for token in choice.tokens}
    unused = set(range(1, setting.referee.vocab_size)) - used
    if not unused:
        raise UBatchError("every token of the vocabulary is in a request; give fewer --streams.")
    return max(unused)


def _print_poisoned(done: list[Poisoned]) -> None:
    head = {"a request that": "", "s": ".0f", "restarts": "", "it ended with": "", "others": "", "equal": ""}
    rows = []
    for each in done:
        restarts = ", ".join(f"{count} {name}" for name, count in each.restarts.items() if count) or "-"
        equal = str(each.others.counts[Verdict.EQUAL])
        end = each.code or str(each.error)[:60]
        rows.append((each.name, each.seconds, restarts, end, str(each.others.requests), equal))
    print(table(head, rows), flush=True)


# -- the limit ---------------------------------------------------------------------------------------------------------


def run_limit(setting: shared.Setting) -> shared.Found:
    """Kill engines of a server with the default limits until it ends."""
    with setting.server() as subject:
        kills, answers = asyncio.run(_kill_until_it_ends(setting, subject))
        ended, last = subject.end(), subject.log().splitlines()[-1:]
    # A request that was sent after the end was refused by nobody.
    failed = [each.error for each in answers if each.error is not None and each.status is not None]
    unnamed = [error for error in failed if "rank 0" not in error]
    broken = {
        f"the server ended after {kills} kills": kills != _DEFAULT_RESTARTS + 1,
        f"its last line does not name the rank: {last}": not any("rank 0" in line for line in last),
        f"a request ended without the rank's name: {unnamed[:1]}": unnamed,
    }
    found = [what for what, is_so in broken.items() if is_so] + shared.faults_of_end(ended, status=1)
    print(f"  ended after {kills} kills with status {ended.status}: {' '.join(last)}", flush=True)
    return shared.Found({"kills": kills, "ended": ended, "said": last}, [f"limit: {each}" for each in found])


async def _kill_until_it_ends(setting: shared.Setting, subject: Subject) -> tuple[int, list[Answer]]:
    async with shared.running_load(subject, setting.requests, _FEW) as load:
        with suppress(shared.NotHealthy):
            most = 2 * _DEFAULT_RESTARTS + 2
            rng = random.Random(0)
            await shared.kill_engines(
                subject, load, most, rng, between_s=_LIMIT_BETWEEN_S, again_s=_AGAIN_S, twice=False
            )
    return load.kills, [answer for _, answer in load.answers]
