"""Watch a server while it is attacked: a steady load of streams, `/health`, and the API process's memory.

Checks after a load: requests leave nothing behind, memory does not grow, and a hung rank is noticed; and what all that
was observed says of the promises of a server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import numpy as np

from serving.workbench.bench.server.load import Load, make_tasks, read_metrics
from serving.workbench.bench.server.process import Subject, resident_bytes
from serving.workbench.bench.server.requests import (
    GREEDY,
    Outcome,
    RequestFailed,
    Server,
    Status,
    Task,
    ask_json,
    send,
    send_all,
)

_EVERY_S = 0.1
_TIE = 1e-3
"""If two tokens' logits differ by at most this, either may win, depending on the batch: rounding, not an error."""


@dataclass(frozen=True)
class Reference:
    """The expected answer to a prompt: the server's greedy answer before any attack.

    Attributes:
        ties: character positions of tokens that nearly tie with another; after the first of them, answers may differ.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    text: str
    ties: tuple[int, ...] = ()

    def allows(self, outcome: Outcome) -> bool:
        """Whether a complete answer equals this one, or has the same length and first differs at a tie."""
        if outcome.finish_reason != "length" or outcome.output_tokens != self.max_tokens:
            return False
        text = outcome.text
        pairs = enumerate(zip(self.text, text, strict=False))
        same = next((place for place, (own, other) in pairs if own != other), min(len(self.text), len(text)))
        return text == self.text or any(tie <= same for tie in self.ties)


async def ask_references(server: Server, asked: Sequence[tuple[Sequence[int], int]]) -> list[Reference]:
    """The answers of an undisturbed server to prompts and numbers of tokens, and the positions of their near-ties."""
    async with server.client() as client:

        async def ask(prompt: Sequence[int], max_tokens: int) -> Reference:
            body = {"model": server.model, "prompt": list(prompt), "max_tokens": max_tokens, "logprobs": 2}
            answer = await ask_json(client, "POST", server.endpoint.path, {**body, **GREEDY})
            choice = answer["choices"][0]
            told = choice["logprobs"]
            close = [_margin(likeliest) < _TIE for likeliest in told["top_logprobs"]]
            ties = tuple(offset for offset, tie in zip(told["text_offset"], close, strict=True) if tie)
            return Reference(tuple(prompt), max_tokens, choice["text"], ties)

        return list(await asyncio.gather(*(ask(*each) for each in asked)))


def _margin(likeliest: Mapping[str, float]) -> float:
    values = sorted(likeliest.values(), reverse=True)
    return values[0] - values[1] if len(values) > 1 else 0.0  # two tokens of the same text


@dataclass
class Window:
    """A span of time (seconds of `time.perf_counter()`), what happened in it, such as an attack's name, and how
    `/health` answered: seconds of each request, and the answers other than 200."""

    name: str
    begun: float
    ended: float = float("inf")
    health_s: list[float] = field(default_factory=list)
    unhealthy: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """How the streams fared in a window.

    Attributes:
        wrong: number of streams whose text differs from their reference.
        failed: the error of each failed stream.
        tokens_per_s: events with text per second, about one per token.
        gap_median_s: median time between two events with text, over gaps that overlap the window; None without gaps.
    """

    ended: int
    wrong: int
    failed: tuple[str, ...]
    tokens_per_s: float
    gap_median_s: float | None
    gap_p99_s: float | None


class Watch:
    """Keeps as many streams running as there are references, and asks `/health` ten times a second.

    Use as an asynchronous context manager; `window` starts the next window, `windows` has all so far.
    """

    def __init__(self, server: Server, references: Sequence[Reference]) -> None:
        self._server, self._references = server, references
        self._outcomes: list[tuple[Reference, Outcome]] = []
        self._begun = time.perf_counter()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.windows: list[Window] = []

    async def __aenter__(self) -> Watch:
        self.window("start")
        self._client = self._server.client()
        streams = [self._stream(reference) for reference in self._references]
        self._tasks = [asyncio.create_task(each) for each in [*streams, self._ask_health()]]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        await self._client.aclose()
        self.windows[-1].ended = time.perf_counter()

    def window(self, name: str) -> Window:
        """End the current window, and start the next."""
        now = time.perf_counter()
        if self.windows:
            self.windows[-1].ended = now
        self.windows.append(Window(name, now))
        return self.windows[-1]

    async def during(self, name: str, seconds: float | Awaitable[object]) -> Window:
        """A window that lasts that many seconds, or until the awaitable is done."""
        window = self.window(name)
        await (asyncio.sleep(seconds) if isinstance(seconds, float | int) else seconds)
        window.ended = time.perf_counter()
        return window

    def seen(self, window: Window) -> Seen:
        """How the streams fared in a window; call it after all streams have ended."""
        ended, wrong, failed = 0, 0, []
        gaps: list[float] = []
        for reference, outcome in self._outcomes:
            gaps += outcome.gaps_between(window.begun - self._begun, window.ended - self._begun)
            if not window.begun < self._begun + outcome.sent_s + outcome.latency_s <= window.ended:
                continue
            ended += 1
            if outcome.status is not Status.OK:
                failed.append(outcome.error or outcome.status.value)
            elif not reference.allows(outcome):
                wrong += 1
        median, p99 = (float(value) for value in np.percentile(gaps, [50, 99])) if gaps else (None, None)
        return Seen(ended, wrong, tuple(failed), len(gaps) / (window.ended - window.begun), median, p99)

    async def _stream(self, reference: Reference) -> None:
        while not self._stopping.is_set():
            task = Task(0, reference.prompt, reference.max_tokens, fields=GREEDY)
            outcome = await send(self._server, self._client, task, self._begun)
            self._outcomes.append((reference, outcome))
            if outcome.status is not Status.OK:
                await asyncio.sleep(_EVERY_S)

    async def _ask_health(self) -> None:
        """Ask `/health` on one connection that stays open: a new one may be refused during an attack."""
        async with self._server.client() as client:
            while not self._stopping.is_set():
                window, asked = self.windows[-1], time.perf_counter()
                try:
                    answer = await client.get("/health")
                    if answer.status_code != httpx.codes.OK:
                        window.unhealthy.append(str(answer.status_code))
                except httpx.HTTPError as error:
                    window.unhealthy.append(type(error).__name__)
                window.health_s.append(time.perf_counter() - asked)
                await asyncio.sleep(_EVERY_S)


# -- checks ------------------------------------------------------------------------------------------------------------


_REST_S = 60.0
_AT_REST = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


async def rest(server: Server) -> str | None:
    """Wait until the engines hold no requests and no KV; returns what they still hold after a minute, or None.

    Raises:
        RequestFailed: `/metrics` lacks these numbers.
    """
    deadline = time.monotonic() + _REST_S
    while True:
        totals: defaultdict[str, float] = defaultdict(float)
        for sample in await read_metrics(server):
            totals[sample.name] += sample.value
        if missing := [name for name in _AT_REST if name not in totals]:
            raise RequestFailed(f"/metrics of {server.base_url} has no {', '.join(missing)}: nothing can be checked.")
        held = {name: totals[name] for name in _AT_REST if totals[name]}
        if not held:
            return None
        if time.monotonic() > deadline:
            return ", ".join(f"{name} {value:g}" for name, value in held.items())
        await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Round:
    """Result of one load of streams, a third of which is dropped.

    Attributes:
        wrong: complete answers that differ from those of the server without load.
        held: what the engines still hold afterwards; None for nothing.
        resident: memory in bytes of the API process and of each engine, afterwards.
    """

    ok: int
    cancelled: int
    failed: int
    wrong: int
    held: str | None
    resident: tuple[int, ...]
    first_error: str | None


async def rounds(subject: Subject, count: int, streams: int) -> list[Round]:
    """Run the same streams `count` times; a third of them is dropped midway."""
    server = subject.server
    load = Load(num_prompts=streams, input_len=16, output_len=24, range_ratio=0.5, cancel_ratio=1 / 3)
    tasks = await make_tasks(server, load, **GREEDY)
    references = await ask_references(server, [(list(map(int, task.prompt)), task.max_tokens) for task in tasks])
    done: list[Round] = []
    for _ in range(count):
        outcomes = await send_all(server, tasks)
        held = await rest(server)
        resident = tuple(resident_bytes(pid) for pid in (subject.pid, *subject.ranks()))
        ok, failed, cancelled = ([each for each in outcomes if each.status is status] for status in Status)
        wrong = sum(not references[each.index].allows(each) for each in ok)
        first_error = failed[0].error if failed else None
        done.append(Round(len(ok), len(cancelled), len(failed), wrong, held, resident, first_error))
    return done


@dataclass(frozen=True)
class Hang:
    """What a server did after a rank was stopped.

    Attributes:
        unhealthy_s: seconds until `/health` answered 503; None if it never did.
        errors: errors of the running streams.
        ended_s: seconds until the server ended; None if it did not.
    """

    rank: int
    unhealthy_s: float | None
    errors: tuple[str, ...]
    ended_s: float | None
    exit_status: int | None


async def hang(subject: Subject, timeout_s: float) -> Hang:
    """Stop the last rank while streams run, and observe the server, up to twice the `timeout_s` after which it must
    notice. The server has ended afterwards."""
    ranks = subject.ranks()
    rank = len(ranks) - 1
    tasks = await make_tasks(subject.server, Load(num_prompts=8, input_len=8, output_len=512), ignore_eos=True)
    streams = asyncio.create_task(send_all(subject.server, tasks))
    await asyncio.sleep(1.0)
    begun, patience_s = time.monotonic(), 2 * timeout_s + 10
    os.kill(ranks[rank], signal.SIGSTOP)
    try:
        unhealthy_s = await subject.wait_sick(patience_s)
        while subject.alive and time.monotonic() < begun + patience_s:
            await asyncio.sleep(0.1)
        ended_s = None if subject.alive else time.monotonic() - begun
    finally:
        with suppress(ProcessLookupError):  # the server has ended it already
            os.kill(ranks[rank], signal.SIGKILL)
    errors = tuple(outcome.error or "none" for outcome in await streams)
    return Hang(rank, unhealthy_s, errors, ended_s, subject.process.process.poll())


# -- the faults --------------------------------------------------------------------------------------------------------


_GIGABYTE = 10**9
_SLOWEST_HEALTH_S = 1.0
_LONGEST_WAIT_S = 2.0
"""Longest wait of a short request behind a large body: some steps, however many prompts that body has."""
_GAP_RATIO = 3.0
_MEMORY_GROWTH = 1.05
"""Largest growth factor from the second round on; the first round fills caches and the allocator's pools."""
_NOTICED_LATER_S = 5.0
"""Seconds allowed beyond the server's `timeout_s`, because heartbeats are checked at intervals."""


@dataclass(frozen=True)
class Row:
    """The results of a window.

    Attributes:
        answers: answer -> how often it occurred.
        waits_s: seconds that short requests waited.
        unexpected: answers that are not allowed, and required ones that are missing, as `no 503`.
        health_s: seconds of the slowest `/health`; 0 in a window too short for one.
        unhealthy: answers of `/health` other than 200.
    """

    name: str
    seconds: float
    answers: Mapping[str, int]
    waits_s: Sequence[float]
    unexpected: Sequence[str]
    health_s: float
    unhealthy: Sequence[str]
    seen: Seen


def faults_of_windows(rows: Sequence[Row]) -> list[str]:
    """Faults while the streams ran."""
    faults: list[str] = []
    for row in rows:
        seen = row.seen
        broken = {
            f"answered {', '.join(row.unexpected)}": row.unexpected,
            f"/health gave {', '.join(row.unhealthy[:5])}": row.unhealthy,
            f"/health took {row.health_s:.2f} s": row.health_s >= _SLOWEST_HEALTH_S,
            f"{seen.wrong} streams got a wrong token": seen.wrong,
            f"{len(seen.failed)} streams failed, the first with {seen.failed[:1]}": seen.failed,
            "the streams stood still": seen.gap_p99_s is None,
        }
        broken |= {f"a short request waited {wait:.2f} s": wait > _LONGEST_WAIT_S for wait in row.waits_s}
        faults += [f"{row.name}: {what}" for what, is_so in broken.items() if is_so]
    ratio = stretch(rows)
    if ratio is not None and ratio >= _GAP_RATIO:
        faults.append(f"inter-token p99 rose {ratio:.2f} times while long prompts arrived")
    return faults


def stretch(rows: Sequence[Row]) -> float | None:
    """Streams' inter-token p99 while long prompts arrive / the p99 without them; None if none arrived."""
    alone = next((row.seen.gap_p99_s for row in rows if row.name == "streams alone"), None)
    arriving = next((row.seen.gap_p99_s for row in rows if "arrive" in row.name), None)
    return arriving / alone if arriving is not None and alone is not None else None


def faults_of_memory(peak: int, overlapped: int) -> list[str]:
    """Faults in the API process's peak memory (bytes) and in the number of steps that ran in lanes."""
    faults = [f"the API process took {peak / 1e9:.2f} GB"] if peak >= _GIGABYTE else []
    return faults + (["no step overlapped"] if not overlapped else [])


def faults_of_rounds(done: Sequence[Round], streams: int) -> list[str]:
    """Faults in rounds of `streams` streams; memory is only compared if there are three rounds or more."""
    faults: list[str] = []
    for number, each in enumerate(done, 1):
        broken = {
            f"{each.failed} streams failed, the first with {each.first_error}": each.failed,
            f"{streams - each.ok - each.cancelled - each.failed} streams have no end": (
                each.ok + each.cancelled + each.failed != streams
            ),
            "nobody left": not each.cancelled,
            f"{each.wrong} streams got a wrong token": each.wrong,
            f"the engines hold {each.held}": each.held is not None,
        }
        faults += [f"round {number}: {what}" for what, is_so in broken.items() if is_so]
    for place, (early, late) in enumerate(zip(done[1].resident, done[-1].resident, strict=True) if done[2:] else ()):
        if late > early * _MEMORY_GROWTH:
            whose = f"engine {place - 1}" if place else "the API process"
            faults.append(f"{whose} grew from {early / 1e6:.0f} to {late / 1e6:.0f} MB")
    return faults


def faults_of_hang(seen: Hang, timeout_s: float) -> list[str]:
    """Faults after a rank was stopped, on a server with this `timeout_s`."""
    unnamed = [error for error in seen.errors if f"rank {seen.rank}" not in error]
    broken = {
        "/health did not say in time that a rank hung": (
            seen.unhealthy_s is None or seen.unhealthy_s > timeout_s + _NOTICED_LATER_S
        ),
        f"streams ended without the rank's name, the first with {unnamed[:1]}": unnamed,
        f"the server ended with {seen.exit_status}, not as after a failure": (seen.exit_status or 0) <= 0,
    }
    return [what for what, is_so in broken.items() if is_so]
