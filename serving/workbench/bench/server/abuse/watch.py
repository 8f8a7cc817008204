"""Watch a server while it is attacked: a steady load of streams, `/health`, and the API process's memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np

from serving.workbench.bench.server.requests import GREEDY, Outcome, Server, Status, Task, ask_json, send

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
