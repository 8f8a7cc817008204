"""Requests of `ubatch bench faults`: half of them streamed, half sampled, each with something that a restart could
break; and everything that their answers say: texts, tokens, log-probabilities, ends."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from serving.workbench.bench.server.requests import RequestFailed, Server, read_answer, read_payloads

_PATH = "/v1/completions"


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        kind: what it tries, such as `penalties`.
        stream: whether its answer is streamed.
        fields: fields of its body, besides the model and the prompt.
    """

    kind: str
    prompt: tuple[int, ...]
    stream: bool
    fields: Mapping[str, Any]

    @property
    def sampled(self) -> bool:
        return bool(self.fields.get("temperature", 1))

    @property
    def repeats(self) -> bool:
        """Whether every answer must be the same."""
        return not self.sampled or "seed" in self.fields

    @property
    def outputs(self) -> int:
        return int(self.fields.get("n", 1))

    def seed(self, output: int) -> int:
        """The seed of one of its outputs."""
        return int(self.fields.get("seed", 0)) + output

    def body(self, model: str) -> dict[str, Any]:
        body = {"model": model, "prompt": list(self.prompt), "stream": self.stream, "return_token_ids": True}
        return body | dict(self.fields) | ({"stream_options": {"include_usage": True}} if self.stream else {})

    def __str__(self) -> str:
        how = "seeded" if "seed" in self.fields else "unseeded"
        return f"{self.kind}, {'streamed' if self.stream else 'whole'}, {how if self.sampled else 'greedy'}"


@dataclass
class Choice:
    """One output.

    Attributes:
        tokens: its token ids.
        logprobs: of each token, where they were asked for.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """What came of a request.

    Attributes:
        choices: one per output.
        completion_tokens: the server's count; None if it gave none.
        times: when something with tokens came, by `time.monotonic()`.
        error: why there is no answer, or no whole one; None if there is.
        code: the error's code, such as `poisonous_request`, if the server named one.
    """

    choices: list[Choice]
    completion_tokens: int | None = None
    times: list[float] = field(default_factory=list)
    error: str | None = None
    code: str | None = None
    status: int | None = None


async def ask(
    server: Server, client: httpx.AsyncClient, asked: Asked, told: Callable[[Answer], object] = lambda _: None
) -> Answer:
    """Send a request and read its answer to the end; a failure is part of the answer. `told` is called whenever tokens
    have come."""
    answer = Answer([Choice() for _ in range(asked.outputs)])
    try:
        async with client.stream("POST", _PATH, json=asked.body(server.model)) as response:
            answer.status = response.status_code
            async with aclosing(read_payloads(response, stream=asked.stream)) as payloads:
                async for payload, _ in payloads:
                    _take(answer, payload)
                    told(answer)
    except (httpx.HTTPError, RequestFailed) as failure:
        answer.error, answer.code = f"{type(failure).__name__}: {failure}", getattr(failure, "code", None)
    return answer


async def ask_all(server: Server, requests: Sequence[Asked]) -> list[Answer]:
    """The answers to requests that are sent all at once."""
    async with server.client() as client:
        return list(await asyncio.gather(*(ask(server, client, each) for each in requests)))


def _take(answer: Answer, payload: bytes) -> None:
    """Add a whole answer, or an event of a stream."""
    read = read_answer(payload)
    if read.usage is not None:
        answer.completion_tokens = read.usage.completion_tokens
    for each in read.choices:
        if each.index >= len(answer.choices):
            raise RequestFailed(f"output {each.index} was not asked for.")
        choice = answer.choices[each.index]
        if choice.finish_reason is not None:
            raise RequestFailed(f"output {each.index} goes on after its end ({choice.finish_reason}).")
        choice.text += each.text or ""
        choice.tokens += each.token_ids or ()
        choice.logprobs += [value for value in (each.logprobs or {}).get("token_logprobs", ()) if value is not None]
        choice.finish_reason = each.finish_reason
        if each.token_ids:
            answer.times.append(time.monotonic())


# -- which requests ----------------------------------------------------------------------------------------------------


_STOP_CHARACTERS = 6
_SCHEMA: Mapping[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 60}
_ENDLESS: Mapping[str, Any] = {"ignore_eos": True}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": _ENDLESS,
    "stop string": _ENDLESS,
    "logprobs": {**_ENDLESS, "logprobs": 3},
    "two outputs": {**_ENDLESS, "n": 2},
    "penalties": {**_ENDLESS, "frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "min_tokens": {},
    "json schema": {"structured_outputs": {"json": _SCHEMA}},
    "truncated": {**_ENDLESS, "top_k": 40, "top_p": 0.9},
}
"""Name -> fields. The stop string and the stop token come from the first answers (`with_stops`)."""


def make_requests(pool: Sequence[int], count: int, max_tokens: int, seed: int = 0) -> list[Asked]:
    """The requests, the same for the same arguments; `pool` has tokens that are plain text.

    Request i is streamed if i is odd, sampled if bit 1 is set, and of kind i // 4; every fourth round of kinds has no
    seed, and asks for log-probabilities, by which it can be checked.
    """
    rng, kinds, made = random.Random(seed), list(KINDS), []
    for index in range(count):
        kind = kinds[index // 4 % len(kinds)]
        fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, **KINDS[kind]}
        if index & 2:
            fields["temperature"] = 0.8
            unseeded = (index // (4 * len(kinds)) + index // 4) % 4 == 3
            fields |= {"logprobs": 1} if unseeded else {"seed": rng.getrandbits(31)}
        prompt = tuple(rng.choices(pool, k=rng.randint(8, 64)))
        made.append(Asked(kind, prompt, bool(index & 1), fields))
    return made


def with_stops(requests: Sequence[Asked], answers: Sequence[Answer]) -> list[Asked]:
    """The requests, with the stop string or stop token of those that get one, taken from their answers without it: a
    string that ends two thirds of the way, and a token that comes early, but may end the output only after that."""
    return [_with_stop(*pair) for pair in zip(requests, answers, strict=True)]


def _with_stop(asked: Asked, answer: Answer) -> Asked:
    text, tokens = answer.choices[0].text, answer.choices[0].tokens
    more: dict[str, Any] = {}
    if asked.kind == "stop string" and len(text) > _STOP_CHARACTERS:
        begin = len(text) * 2 // 3
        more = {"stop": [text[begin : begin + _STOP_CHARACTERS]]}
    elif asked.kind == "min_tokens" and tokens:
        more = {"stop_token_ids": [tokens[len(tokens) // 4]], "min_tokens": asked.fields["max_tokens"] * 3 // 4}
    return replace(asked, fields={**asked.fields, **more})
