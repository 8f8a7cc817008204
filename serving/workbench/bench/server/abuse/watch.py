"""What is watched while a server is attacked: a steady load of streams, `/health`, and the API process's memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import httpx
import numpy as np

from serving.workbench.bench.server.requests import Outcome, RequestFailed, Server, Status, Task, refused, send

__all__ = ["Reference", "Seen", "Watch", "Window", "ask_references", "resident_bytes"]

_EVERY_S = 0.1
_TIE = 1e-3
"""Two tokens whose logits are no further apart may change places with the size of a batch: rounding, not an error."""


@dataclass(frozen=True)
class Reference:
    """What a prompt's answer must be.

    Attributes:
        prompt: token ids.
        max_tokens: of the answer; it has as many.
        text: the greedy answer of the server before anything happened to it.
        ties: characters at which a token begins that another one nearly equals; behind the first, texts may differ.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    text: str
    ties: tuple[int, ...] = ()

    def allows(self, outcome: Outcome) -> bool:
        """Whether a whole answer is this one, or is as long and leaves it only at a tie."""
        if outcome.finish_reason != "length" or outcome.output_tokens != self.max_tokens:
            return False
        text = outcome.text
        pairs = enumerate(zip(self.text, text, strict=False))
        same = next((place for place, (own, other) in pairs if own != other), min(len(self.text), len(text)))
        return text == self.text or any(tie <= same for tie in self.ties)


async def ask_references(server: Server, asked: Sequence[tuple[Sequence[int], int]]) -> list[Reference]:
    """The answers of an undisturbed server, with where they are close calls.

    Args:
        server: whom to ask.
        asked: prompts, and how many tokens their answers have.

    Raises:
        RequestFailed: the server refused one.
    """
    async with server.client() as client:

        async def ask(prompt: Sequence[int], max_tokens: int) -> Reference:
            body = {"model": server.model, "prompt": list(prompt), "max_tokens": max_tokens, "logprobs": 2}
            answer = await client.post(server.endpoint.path, json=body | {"temperature": 0, "ignore_eos": True})
            if answer.status_code != httpx.codes.OK:
                raise refused(answer, answer.content)
            choice = answer.json()["choices"][0]
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
    """A stretch of time, in `time.perf_counter()`, and what was seen in it.

    Attributes:
        name: of what happened in it.
        begun, ended: seconds.
        health_s: seconds that each `/health` took that was asked in it.
        unhealthy: what else than 200 it answered.
    """

    name: str
    begun: float
    ended: float = float("inf")
    health_s: list[float] = field(default_factory=list)
    unhealthy: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """How the streams fared in a window.

    Attributes:
        ended: streams that came to their end.
        wrong: those with another text than their reference.
        failed: those that failed, and why.
        tokens_per_s: events with text, about.
        gap_median_s: between one event with text and the next, where any of it lies in the window; None for none.
        gap_p99_s: the same.
    """

    ended: int
    wrong: int
    failed: tuple[str, ...]
    tokens_per_s: float
    gap_median_s: float | None
    gap_p99_s: float | None


class Watch:
    """Keeps as many streams running as there are references, and asks `/health` ten times a second.

    Use as an asynchronous context manager; `window` begins the next stretch of time.

    Args:
        server: whom to watch.
        references: prompts, and what their answers must be.

    Attributes:
        windows: so far.
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
        """End the last stretch of time, and begin the next."""
        now = time.perf_counter()
        if self.windows:
            self.windows[-1].ended = now
        self.windows.append(Window(name, now))
        return self.windows[-1]

    async def during(self, name: str, seconds: float | Awaitable[object]) -> Window:
        """A window that lasts so many seconds, or as long as something takes."""
        window = self.window(name)
        await (asyncio.sleep(seconds) if isinstance(seconds, float | int) else seconds)
        window.ended = time.perf_counter()
        return window

    def seen(self, window: Window) -> Seen:
        """How the streams fared in a window; to be asked when all have ended."""
        ended, wrong, failed = 0, 0, []
        gaps: list[float] = []
        for reference, outcome in self._outcomes:
            sent = self._begun + outcome.sent_s
            times = accumulate(outcome.gaps_s, initial=sent + (outcome.ttft_s or 0.0))
            next(times)
            gaps += [
                gap
                for gap, at in zip(outcome.gaps_s, times, strict=True)
                if window.begun < at and at - gap < window.ended
            ]
            if not window.begun < sent + outcome.latency_s <= window.ended:
                continue
            ended += 1
            if outcome.status is not Status.OK:
                failed.append(outcome.error or outcome.status.value)
            elif not reference.allows(outcome):
                wrong += 1
        median, p99 = (float(value) for value in np.percentile(gaps, [50, 99])) if gaps else (None, None)
        return Seen(ended, wrong, tuple(failed), len(gaps) / (window.ended - window.begun), median, p99)

    async def _stream(self, reference: Reference) -> None:
        """One stream after the other, of the same prompt."""
        fields = {"temperature": 0, "ignore_eos": True}
        while not self._stopping.is_set():
            task = Task(0, reference.prompt, reference.max_tokens, fields=fields)
            outcome = await send(self._server, self._client, task, self._begun)
            self._outcomes.append((reference, outcome))
            if outcome.status is not Status.OK:
                await asyncio.sleep(_EVERY_S)

    async def _ask_health(self) -> None:
        """On one connection: a new one is refused where there are too many."""
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


def resident_bytes(pid: int, *, peak: bool = False) -> int:
    """Memory of a process that is in RAM, now or at most so far.

    Raises:
        RequestFailed: the process is gone.
    """
    field_name = "VmHWM:" if peak else "VmRSS:"
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field_name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    raise RequestFailed(f"process {pid} of the server is gone.")
