"""Attacks on a server, and the answers that it may give: a table of bodies, one of connections, one of loads."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from serving.workbench.bench.server.requests import Server

_MILLION = 10**6
_CLIENT_S = 120.0


@dataclass(frozen=True)
class Target:
    """The server under attack.

    Attributes:
        tokens: ids of tokens that are plain text.
        poisoned: id of a token whose embedding is nan.
        arrivals_s: seconds for which prompts keep arriving.
    """

    server: Server
    tokens: Sequence[int]
    poisoned: int
    max_model_len: int
    max_connections: int
    arrivals_s: float

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.server.base_url)
        return url.host, url.port or 80

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        return random.Random(seed).choices(self.tokens, k=length)

    def body(self, **fields: Any) -> dict[str, Any]:
        """A request's body with these fields; greedy, so that it does not generate the poisoned token by chance."""
        return {"model": self.server.model, "prompt": self.prompt(8), "max_tokens": 8, "temperature": 0} | fields


Answers = list[str | float]
"""HTTP statuses; `closed` if a connection ended without one, `nothing` if none was received. Floats: seconds that a
short request waited, which had to be served soon."""


@dataclass(frozen=True)
class Attack:
    """One way to harm a server.

    Attributes:
        answers: answers that the server may give; any other is a fault.
        needs: answers that must occur; otherwise the attack did not reach its target.
    """

    name: str
    run: Callable[[Target], Awaitable[Answers]]
    answers: frozenset[str]
    needs: frozenset[str]


# -- bodies


async def _post(target: Target, *contents: bytes | AsyncIterator[bytes], path: str = "/v1/completions") -> Answers:
    """Send bodies at once, each on a connection of its own."""
    async with target.server.client() as client:

        async def post(content: bytes | AsyncIterator[bytes]) -> str:
            headers = {"Content-Type": "application/json"}
            try:
                answer = await client.post(path, content=content, headers=headers, timeout=_CLIENT_S)
            except httpx.TimeoutException:
                return "nothing"
            except httpx.TransportError:
                return "closed"
            return str(answer.status_code)

        return list(await asyncio.gather(*map(post, contents)))


def _bodies(
    make: Callable[[Target], Sequence[Mapping[str, Any] | bytes]], path: str = "/v1/completions"
) -> Callable[[Target], Awaitable[Answers]]:
    """An attack that sends the bodies that `make` builds for the target; mappings are sent as JSON."""

    async def run(target: Target) -> Answers:
        bodies = await asyncio.to_thread(encode, target)  # in a thread: the event loop must keep watching the server
        return await _post(target, *bodies, path=path)

    def encode(target: Target) -> list[bytes]:
        return [each if isinstance(each, bytes) else msgspec.json.encode(each) for each in make(target)]

    return run


def _nan(target: Target) -> list[Mapping[str, Any]]:
    poisoned = [[target.poisoned], [*target.prompt(40), target.poisoned, *target.prompt(5)]]
    return [target.body(prompt=prompt, n=4, max_tokens=32) for prompt in poisoned * 4]


def _stop_strings(target: Target) -> list[Mapping[str, Any]]:
    return [target.body(stop="a" * length, n=8) for length in (20_000, 100_000)] + [target.body(stop=["a"] * 1000)]


def _long_stop_strings(target: Target) -> list[Mapping[str, Any]]:
    return [target.body(stop=["a" * 998 + f"{number:02}" for number in range(64)], n=8) for _ in range(4)]


def _biases(target: Target) -> list[Mapping[str, Any]]:
    zeros = {"0" * (number % 15) + str(number // 15): 1.0 for number in range(300_000)}
    return [target.body(logit_bias=zeros), target.body(stop_token_ids=list(range(_MILLION)))]


def _most_biases(target: Target) -> list[Mapping[str, Any]]:
    bias = {str(token): -1.0 for token in target.tokens[:1024]}
    return [target.body(logit_bias=bias, max_tokens=32) for _ in range(20)]


def _broken(target: Target) -> list[Mapping[str, Any] | bytes]:
    deep = b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    digits = {"9" * 5000: 1.0}
    wrong: list[dict[str, Any]] = [
        {"max_tokens": 2.5},
        {"temperature": "hot"},
        {"prompt": [10**9]},
        {"n": 10**6},
        {"prompt": ["", []]},
    ]
    wrong += [{"logit_bias": digits}, {"seed": 2**70}, {"max_tokens": 10**12}, {"min_tokens": "0" * 10**6}]
    wrong += [{"structured_outputs": {"regex": "("}}, {"response_format": {"type": "json_schema"}}]
    bodies = [deep, b"", b"{", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": 1e999}', b"null", b'{"prompt": "\\ud800"}']
    return [*bodies, *(target.body(**fields) for fields in wrong)]


def _grammars(target: Target) -> list[Mapping[str, Any]]:
    """Forms of the output that would take a compiler hours, gigabytes, or its life."""
    rules = "\n".join(f"r{number}: r{number + 1}" for number in range(12_000))
    again = [{"$ref": f"#/$defs/d{number + 1}", "minItems": 1} for number in range(30)]
    defs = {f"d{number}": {"type": "array", "prefixItems": [inner] * 2} for number, inner in enumerate(again)}
    schemas: list[Any] = [
        {"$defs": {**defs, "d30": {"type": "integer"}}, "$ref": "#/$defs/d0"},
        {"allOf": [{"anyOf": [{"required": [f"{one}{two}"]} for two in range(4)]} for one in range(12)]},
        {"enum": [f"value {number}" for number in range(25_000)]},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        '{"items":' * 50_000 + "{}" + "}" * 50_000,
        " " * 4 * _MILLION,
    ]
    forms: list[dict[str, Any]] = [{"json": schema} for schema in schemas]
    forms += [{"regex": regex} for regex in ("(" * 10_000, "(a?){20000}" * 2000, "(?=a)", "a" * _MILLION)]
    forms += [{"grammar": f'start: r0\n{rules}\nr12000: "a"'}, {"grammar": "start: " + "(" * 100_000}]
    forms += [{"choice": ["a" * _MILLION]}]
    return [target.body(structured_outputs=form) for form in forms]


def _greedy_grammars(target: Target) -> list[Mapping[str, Any]]:
    """Forms that compile, and whose masks take long: a step's limits may end such an output."""
    regexes = ["(a{1,1000}){1,1000}", r"(\p{L}|\p{N}){1,10000}", "(.*a.*){20}"]
    forms: list[dict[str, Any]] = [{"regex": regex} for regex in regexes]
    forms += [{"grammar": 'start: ((("a"{1,1000}){1,1000}){1,1000}){1,1000}'}]
    forms += [{"json": {"type": "object", "properties": {f"p{number}": {} for number in range(200)}}}]
    return [target.body(structured_outputs=form, max_tokens=32, n=2) for form in forms]


def _deep_template(target: Target) -> list[bytes]:
    deep = b'{"a":' * 3000 + b"1" + b"}" * 3000
    chat = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "chat_template_kwargs": %s}'
    return [chat % deep, chat % (b'{"messages": ' + deep + b"}")]


def _tools(target: Target) -> list[Mapping[str, Any]]:
    """Definitions of tools: too large, too many, nested, hostile; calls that must be made of them."""
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    wide = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}}
    hostile = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(" * 1000}}}
    functions: list[list[dict[str, Any]]] = [
        [{"name": f"f{number}", "description": "to be or not " * 8000} for number in range(70)],
        [{"name": f"f{number}"} for number in range(5000)],
        *([{"name": "f", "parameters": schema}] for schema in (deep, wide, hostile)),
        [{"name": "f", "parameters": {"$ref": "#"}}, {"name": "f"}],
    ]
    said = {"model": target.server.model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    tools = [[{"type": "function", "function": function} for function in each] for each in functions]
    return [{**said, "tools": each, "tool_choice": "required"} for each in tools]


def _long_texts(target: Target) -> list[Mapping[str, Any]]:
    return [target.body(prompt="to be or not " * count) for count in (10_000, 100_000, 600_000)]


def _many_outputs(target: Target) -> list[Mapping[str, Any]]:
    return [target.body(prompt=[target.prompt(4)] * 5000, n=10)]


def _tokenize(target: Target) -> list[Mapping[str, Any]]:
    return [{"prompt": "to be or not " * 400_000}, {"prompt": "x" * 5 * _MILLION}]


def _items(target: Target) -> list[Mapping[str, Any]]:
    """Items, parts and tools of responses: too many, too large, or nested."""
    said = {"role": "user", "content": "a"}
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    tool = {"type": "function", "name": "f", "parameters": deep}
    wrong: list[dict[str, Any]] = [
        {"input": [said] * 20_000},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "to be or not "}] * 10_000}]},
        {"input": [deep]},
        {"tools": [tool] * 40},
        {"tools": [{**tool, "description": "a" * _MILLION, "parameters": {}}] * 8},
        {"metadata": {str(number): "a" for number in range(1000)}},
        {"include": ["everything"] * 1000},
        {"instructions": "to be or not " * 400_000},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#/$defs/a"}}}},
    ]
    return [{"model": target.server.model, "input": "a", "max_output_tokens": 4, **each} for each in wrong]


async def _large(target: Target) -> Answers:
    """Send 100 MB, with and without a Content-Length."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * _MILLION

    return await _post(target, b" " * 100 * _MILLION, pieces())


# -- clients that leave, or do not read


async def _leave(target: Target) -> Answers:
    """Clients that disconnect while sending a large body, during tokenization, during outputs, and during streams."""
    texts = msgspec.json.encode(target.body(prompt=["to be or not " * 150] * 1000))
    long = target.body(prompt=target.prompt(100), max_tokens=target.max_model_len - 100, n=8, ignore_eos=True)
    silent = [_head(texts) + texts[: len(texts) // 2]] * 3 + [_head(texts) + texts] * 3
    silent += [_request(long)] * 5
    streamed = [_request(long | {"stream": True})] * 5
    left = (_raw(target, data, wait_s=0.2 + 0.1 * number) for number, data in enumerate(silent))
    return list(await asyncio.gather(*left, *(_raw(target, data, wait_s=30.0) for data in streamed)))


async def _do_not_read(target: Target) -> Answers:
    """Streams whose clients read only the status, and stay connected for a while."""
    body = target.body(prompt=target.prompt(8), max_tokens=512, n=16, ignore_eos=True, stream=True)
    idle = (_raw(target, _request(body), wait_s=30.0, idle_s=5.0) for _ in range(4))
    return list(await asyncio.gather(*idle))


# -- connections


def _head(body: bytes | int) -> bytes:
    """The headers of a request with this body, or with a body of that many bytes."""
    length = body if isinstance(body, int) else len(body)
    lines = ["POST /v1/completions HTTP/1.1", "Host: here", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def _request(body: Mapping[str, Any]) -> bytes:
    data = msgspec.json.encode(body)
    return _head(data) + data


async def _raw(target: Target, data: bytes, wait_s: float, idle_s: float = 0.0) -> str:
    """Send bytes, wait up to `wait_s` for the status, idle for `idle_s` without reading, and disconnect."""
    reader, writer = await asyncio.open_connection(*target.address, limit=1024)
    try:
        status = await _ask(reader, writer, data, wait_s)
        await asyncio.sleep(idle_s)
        return status
    finally:
        writer.transport.abort()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes, wait_s: float) -> str:
    """Send bytes; returns the status, `nothing` after `wait_s`, or `closed`."""
    try:
        writer.write(data)
        line = await asyncio.wait_for(reader.readline(), wait_s)
    except TimeoutError:
        return "nothing"
    except OSError:
        return "closed"
    return line.split()[1].decode() if line else "closed"


async def _half_requests(target: Target) -> Answers:
    """Send headers that never end, and headers without the announced body."""
    headers = b"GET /health HTTP/1.1\r\nHost: here\r\n"
    kinds = [headers, b"G", _head(1000) + b"{"] * 50
    return list(await asyncio.gather(*(_raw(target, data, wait_s=30.0) for data in kinds)))


async def _garbage(target: Target) -> Answers:
    """Send bytes that are no HTTP, and oversized headers."""
    header = b"GET /health HTTP/1.1\r\nHost: here\r\nX: " + b"a" * _MILLION + b"\r\n\r\n"
    kinds = [b"\x16\x03\x01\x02\x00" * 20, b"\r\n\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", header]
    kinds.append(_head(10).replace(b"Content-Length: 10", b"Content-Length: -1") + b"{}")
    return list(await asyncio.gather(*(_raw(target, data, wait_s=12.0) for data in kinds)))


async def _flood(target: Target) -> Answers:
    """Open more connections than the server accepts; each sends a request."""
    ask = b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n"
    count = target.max_connections + 100
    opened = await asyncio.gather(
        *(asyncio.open_connection(*target.address) for _ in range(count)), return_exceptions=True
    )
    streams = [each for each in opened if not isinstance(each, BaseException)]
    turn = asyncio.Semaphore(20)  # many connections, not many requests at once

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        async with turn:
            return await _ask(reader, writer, ask, 30.0)

    try:
        answers: Answers = list(await asyncio.gather(*(answer(*each) for each in streams)))
    finally:
        for _, writer in streams:
            writer.transport.abort()
    return answers + ["closed"] * (count - len(streams))


async def _profiles(target: Target) -> Answers:
    """Ask for profiles, which the server was started without, and for unknown paths."""
    async with target.server.client() as client:
        answers = [await client.post("/start_profile"), await client.get("/v1/nothing"), await client.put("/health")]
    return [str(answer.status_code) for answer in answers]


# -- loads


def _short_behind(count: int, length: int) -> Callable[[Target], Awaitable[Answers]]:
    """Send a short request right after a body with so many prompts of this length; its waiting time is among the
    answers."""

    async def run(target: Target) -> Answers:
        prompts = [target.prompt(min(length, target.max_model_len - 16), seed) for seed in range(count)]
        large = asyncio.create_task(_post(target, msgspec.json.encode(target.body(prompt=prompts, max_tokens=8))))
        await asyncio.sleep(0.3)
        asked = time.perf_counter()
        short = await _post(target, msgspec.json.encode(target.body(max_tokens=1)))
        waited_s = time.perf_counter() - asked
        return [*await large, *short, waited_s]

    return run


async def _arrivals(target: Target) -> Answers:
    """Send prompts of 900 tokens, each as soon as the last one has its token."""
    ends = time.monotonic() + target.arrivals_s
    answers: Answers = []
    length = min(900, target.max_model_len - 16)
    while time.monotonic() < ends:
        body = target.body(prompt=target.prompt(length, len(answers)), max_tokens=1)
        answers += await _post(target, msgspec.json.encode(body))
    return answers


_OK, _WRONG, _TOO_LARGE = "200", "400", "413"

ATTACKS: tuple[Attack, ...] = tuple(
    Attack(name, run, frozenset(answers), frozenset(needs))
    for name, run, answers, needs in (
        ("a token whose embedding is nan", _bodies(_nan), {"500"}, {"500"}),
        ("stop strings of 20,000 and 100,000 characters", _bodies(_stop_strings), {_WRONG}, {_WRONG}),
        ("64 stop strings of 1,000 characters, n = 8", _bodies(_long_stop_strings), {_OK}, {_OK}),
        ("bodies of 100 MB", _large, {_TOO_LARGE, "closed"}, {_TOO_LARGE}),
        ("prompts of 0.1, 1.3 and 7.8 MB", _bodies(_long_texts), {_WRONG}, {_WRONG}),
        ("5 MB to tokenize", _bodies(_tokenize, "/tokenize"), {_OK, _WRONG}, ()),
        ("5,000 prompts x 10 outputs", _bodies(_many_outputs), {_WRONG}, {_WRONG}),
        ("300,000 biases, a million stop ids", _bodies(_biases), {_WRONG}, {_WRONG}),
        ("as many biases as allowed", _bodies(_most_biases), {_OK}, {_OK}),
        ("bodies that are broken or wrong", _bodies(_broken), {_WRONG}, {_WRONG}),
        ("schemas and grammars that are hostile", _bodies(_grammars), {_WRONG}, {_WRONG}),
        ("grammars whose steps are long", _bodies(_greedy_grammars), {_OK, _WRONG}, {_OK}),
        ("deep arguments of the chat template", _bodies(_deep_template, "/v1/chat/completions"), {_OK, _WRONG}, ()),
        ("items and tools of responses", _bodies(_items, "/v1/responses"), {_WRONG, _TOO_LARGE}, {_WRONG}),
        ("definitions of tools", _bodies(_tools, "/v1/chat/completions"), {_OK, _WRONG, _TOO_LARGE}, {_WRONG}),
        ("clients that leave", _leave, {"nothing", _OK}, {"nothing", _OK}),
        ("clients that do not read", _do_not_read, {_OK}, {_OK}),
        ("halves of requests", _half_requests, {"408"}, {"408"}),
        ("what is no HTTP", _garbage, {_WRONG, "404", "408", "431", "closed"}, {_WRONG}),
        ("more connections than there may be", _flood, {_OK, "503", "closed"}, {"503"}),
        ("paths that are off or none", _profiles, {"404", "405"}, {"404"}),
        ("1,000 prompts in one body", _short_behind(1000, 8), {_OK}, {_OK}),
        ("200 prompts of 1,000 tokens in one body", _short_behind(200, 1000), {_OK}, {_OK}),
        ("prompts of 900 tokens arrive", _arrivals, {_OK}, {_OK}),
    )
)
