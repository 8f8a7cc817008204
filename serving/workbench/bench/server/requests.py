"""Requests of the load generator: it sends them when due, reads and times their streams, and may drop them midway."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, cast

import httpx
import msgspec

from ubatch import UBatchError


class RequestFailed(UBatchError):
    """The server refused a request, or its answer does not follow the API; the message quotes the answer.

    Args:
        code: of the API's error, such as `poisonous_request`, if the server named one.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/completions" if self is Endpoint.COMPLETIONS else "/v1/chat/completions"


class Status(StrEnum):
    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Server:
    """The server to send requests to, and how.

    Attributes:
        base_url: the server's URL without `/v1`.
        api_key: sent as a bearer token; None sends none.
        timeout_s: a request fails after this many seconds without a byte from the server.
    """

    base_url: str
    model: str = ""
    endpoint: Endpoint = Endpoint.COMPLETIONS
    stream: bool = True
    api_key: str | None = None
    timeout_s: float = 600.0

    def client(self) -> httpx.AsyncClient:
        """A client without a limit on connections: the load alone decides how many are open.

        It ignores proxies of the environment, which would be measured too.
        """
        headers = {b"Authorization": f"Bearer {self.api_key}".encode()} if self.api_key is not None else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            base_url=self.base_url, headers=headers, limits=limits, timeout=self.timeout_s, trust_env=False
        )


@dataclass(frozen=True)
class Task:
    """One request to send.

    Attributes:
        index: its place in the load.
        prompt: token ids, or text (for chat, the only user message).
        start_s: time at which it is due, in seconds after the load's start.
        cancel_after: drop the connection after this many events with text; None reads to the end.
        fields: more fields of the request's body.
    """

    index: int
    prompt: Sequence[int] | str
    max_tokens: int
    start_s: float = 0.0
    cancel_after: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


GREEDY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}
"""Fields of a request whose answer is always the same, and as long as asked for."""


def greedy_tasks(prompts: Iterable[Sequence[int]], output_len: int) -> list[Task]:
    return [Task(index, prompt, output_len, fields=GREEDY) for index, prompt in enumerate(prompts)]


@dataclass(frozen=True)
class Outcome:
    """The result of a request. Times are seconds.

    Attributes:
        sent_s: time of sending, after the load's start.
        latency_s: from sending to its end.
        ttft_s: from sending to the first text; None without streaming or without text.
        gaps_s: times between one event with text and the next.
        prompt_tokens: the server's count; 0 if it gave none.
        output_tokens: the server's count; if it gave none, the number of events with text.
        counted: whether the server gave token counts.
        error: why the request failed; None if it did not.
    """

    index: int
    status: Status
    sent_s: float
    latency_s: float
    ttft_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None if there is no second token."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return sum(self.gaps_s) / (self.output_tokens - 1)

    def gaps_between(self, begin_s: float, end_s: float) -> list[float]:
        """The gaps that overlap a span of the load's time."""
        ends = accumulate(self.gaps_s, initial=self.sent_s + (self.ttft_s or 0.0))
        pairs = zip(self.gaps_s, pairwise(ends), strict=True)
        return [gap for gap, (start, stop) in pairs if stop > begin_s and start < end_s]


# -- the fields that are read from the server's JSON; all others are skipped


class _Text(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: Any = None
    delta: _Text | None = None
    message: _Text | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass
class _Reading:
    """One answer, as far as it has been read."""

    sent: float
    times: list[float] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: _Usage | None = None

    def take(self, payload: bytes, now: float) -> None:
        """Add one JSON object: a whole answer, or one event of a stream."""
        answer = read_answer(payload)
        self.usage = answer.usage or self.usage
        for choice in answer.choices:
            holder = choice.delta or choice.message
            text = choice.text or (holder.content if holder is not None else None)
            self.finish_reason = choice.finish_reason or self.finish_reason
            if text:
                self.parts.append(text)
                self.times.append(now)

    def outcome(
        self, task: Task, status: Status, started: float, *, streamed: bool, error: str | None = None
    ) -> Outcome:
        usage = self.usage or _Usage()
        return Outcome(
            index=task.index,
            status=status,
            sent_s=self.sent - started,
            latency_s=time.perf_counter() - self.sent,
            ttft_s=self.times[0] - self.sent if streamed and self.times else None,
            gaps_s=tuple(b - a for a, b in pairwise(self.times)) if streamed else (),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens if self.usage is not None else len(self.times),
            counted=self.usage is not None,
            text="".join(self.parts),
            finish_reason=self.finish_reason,
            error=error,
        )


async def send_all(
    server: Server,
    tasks: Sequence[Task],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[Outcome], object] = lambda _: None,
) -> list[Outcome]:
    """Send every request when it is due, at most `max_concurrency` at once; a request's latency starts when it is sent.

    A failed request gets an outcome of its own; the others continue. `on_done` is called with each outcome when its
    request ends. Returns one outcome per task, in their order.
    """
    turn = asyncio.Semaphore(max_concurrency if max_concurrency is not None else max(1, len(tasks)))
    started = time.perf_counter()

    async def run(client: httpx.AsyncClient, task: Task) -> Outcome:
        await asyncio.sleep(started + task.start_s - time.perf_counter())
        async with turn:
            outcome = await send(server, client, task, started)
        on_done(outcome)
        return outcome

    async with server.client() as client, asyncio.TaskGroup() as group:
        running = [group.create_task(run(client, task)) for task in tasks]
    return [each.result() for each in running]


async def send_and_check(server: Server, tasks: Sequence[Task], **how: Any) -> list[Outcome]:
    """As `send_all`.

    Raises:
        RequestFailed: a request failed.
    """
    outcomes = await send_all(server, tasks, **how)
    failed = [each for each in outcomes if each.status is not Status.OK]
    if failed:
        raise RequestFailed(f"{len(failed)} of {len(tasks)} requests failed: {failed[0].error}")
    return outcomes


async def send(server: Server, client: httpx.AsyncClient, task: Task, started: float) -> Outcome:
    """Send one request now and read its answer; a failure is returned as an outcome. `started` is `time.perf_counter()`
    at the load's start."""
    reading = _Reading(time.perf_counter())
    status, error = Status.OK, None
    try:
        async with (
            client.stream("POST", server.endpoint.path, json=_body(server, task)) as response,
            aclosing(read_payloads(response, stream=server.stream)) as payloads,
        ):
            async for payload, now in payloads:
                reading.take(payload, now)
                if server.stream and task.cancel_after is not None and len(reading.times) >= task.cancel_after:
                    status = Status.CANCELLED  # leaving closes the connection
                    break
    except (httpx.HTTPError, RequestFailed) as failure:
        status, error = Status.FAILED, f"{type(failure).__name__}: {failure}"
    return reading.outcome(task, status, started, streamed=server.stream, error=error)


async def read_payloads(response: httpx.Response, *, stream: bool) -> AsyncGenerator[tuple[bytes, float], None]:
    """The JSON of an answer, or of each of its server-sent events up to the end after `[DONE]`; and the time at which
    it was read.

    Raises:
        RequestFailed: the server refused the request, or the stream ended without `[DONE]`.
    """
    if response.status_code != httpx.codes.OK:
        raise refused(response, await response.aread())
    if not stream:
        yield await response.aread(), time.perf_counter()
        return
    rest, done = b"", False
    chunks = cast("AsyncGenerator[bytes, None]", response.aiter_bytes())  # httpx's annotation is too wide
    async with aclosing(chunks):
        async for chunk in chunks:
            now = time.perf_counter()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                name, _, data = line.partition(b":")
                if name == b"data" and data.strip() == b"[DONE]":
                    done = True
                elif name == b"data":
                    yield data.strip(), now
    if not done:
        raise RequestFailed("the stream ended without [DONE].")


def _body(server: Server, task: Task) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": task.prompt}
    if server.endpoint is Endpoint.CHAT:
        prompt = {"messages": [{"role": "user", "content": task.prompt}]}
    body = {"model": server.model, **prompt, "max_tokens": task.max_tokens, "stream": server.stream, **task.fields}
    if server.stream:
        body["stream_options"] = {"include_usage": True}
    return body


async def ask_json(client: httpx.AsyncClient, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """The JSON of an answer.

    Raises:
        RequestFailed: the server refused the request.
    """
    response = await client.request(method, path, json=body)
    if response.status_code != httpx.codes.OK:
        raise refused(response, response.content)
    return response.json()


def read_answer(payload: bytes) -> _Answer:
    """Decode JSON of the API.

    Raises:
        RequestFailed: it is something else, or an error.
    """
    try:
        answer = _decode(payload)
    except msgspec.MsgspecError as error:
        raise RequestFailed(f"not an answer of the API ({error}): {payload[:200]!r}") from error
    if answer.error is not None:
        raise _failed(answer.error)
    return answer


def refused(response: httpx.Response, body: bytes) -> RequestFailed:
    """The error for an answer that is not 200, with its OpenAI error message if it has one."""
    try:
        error = _decode(body).error
    except msgspec.MsgspecError:
        error = body[:200].decode(errors="replace")
    return _failed(error, f"{response.request.url} answers {response.status_code}: ")


def _failed(error: Any, before: str = "") -> RequestFailed:
    """An error of the API, with its message and its code."""
    told = error if isinstance(error, dict) else {"message": error}
    code = told.get("code")
    return RequestFailed(f"{before}{told.get('message', error)}", None if code is None else str(code))
