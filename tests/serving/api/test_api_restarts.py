"""What clients see while engines are started again: they wait, their streams stay open, and nothing is silent."""

import asyncio
import json
import re
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx
import pytest
from api_clients import BODIES, COMPLETIONS, RESPONSES, Exchange, Recorder, app_of, call, client_of, post, says
from fake_engine import CrowdedEngine, FakeEngine

from serving.api.service import Service
from serving.api.sse import COMMENT
from serving.engine.restarts import Pause
from serving.requests import EngineDead, EngineRestarting, PoisonousRequest

KILLED = "rank 1 was killed by SIGKILL."
TICK_S = 0.001
T = TypeVar("T")


def paused(expected_s: float = 12.0, ago_s: float = 0.0) -> Pause:
    return Pause(KILLED, time.monotonic() - ago_s, expected_s)


def within_limit(work: Coroutine[Any, Any, T]) -> T:
    """Run what must end soon."""

    async def run() -> T:
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(run())


async def streaming(engine: FakeEngine, path: str, **options: Any) -> Exchange:
    """A stream that has begun."""
    exchange = Exchange(app_of(engine, **options), path, {**BODIES[path], "stream": True})
    assert await exchange.status() == 200
    return exchange


# -- who watches ---------------------------------------------------------------------------------------------------


def test_a_pause_is_no_reason_to_kill_the_server_but_to_send_requests_elsewhere() -> None:
    engine = FakeEngine()
    app = app_of(engine)
    ready = (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"))

    def seen() -> set[tuple[int, str]]:
        answers = [call(app, *each) for each in ready]
        return {(each.status_code, each.json().get("status") or each.json()["error"]["code"]) for each in answers}

    assert call(app, "GET", "/live").json() == {"status": "ok"}
    assert seen() == {(200, "ok")}
    engine.pause = paused()
    assert call(app, "GET", "/live").json() == {"status": "ok"}
    assert seen() == {(503, "engine_restarting")}
    app.state.service.draining = True
    assert call(app, "GET", "/live").status_code == 200, "it still serves what it has"
    assert seen() == {(503, "shutting_down")}
    engine.pause, engine.dead = None, EngineDead(KILLED)
    for path in ("/live", "/health"):
        answer = call(app, "GET", path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert KILLED in answer.json()["error"]["message"]


@pytest.mark.parametrize(("expected_s", "ago_s", "left_s"), [(12.0, 0.0, 12), (12.0, 9.5, 3), (12.0, 60.0, 1)])
def test_health_says_why_and_for_how_long(expected_s: float, ago_s: float, left_s: int) -> None:
    answer = call(app_of(FakeEngine(pause=paused(expected_s, ago_s))), "GET", "/health")
    message = f"The engines are being started again, which should take another {left_s} s: {KILLED}"
    assert answer.json()["error"]["message"] == message
    assert answer.headers["retry-after"] == str(left_s)


@pytest.mark.long
def test_live_needs_no_key_and_is_described() -> None:
    app = app_of(FakeEngine(), api_key="secret")
    assert call(app, "GET", "/live").status_code == 200
    operation = call(app, "GET", "/openapi.json").json()["paths"]["/live"]["get"]
    assert sorted(operation["responses"]) == ["200", "503"]
    assert "security" not in operation


# -- new requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_new_request_waits_and_is_served(path: str, stream: bool) -> None:
    async def scenario() -> bytes:
        engine = FakeEngine(pause=paused(), serves=asyncio.Event())
        exchange = Exchange(app_of(engine), path, {**BODIES[path], "stream": stream})
        while not engine.alive:
            await asyncio.sleep(0)
        assert engine.serves is not None
        assert not exchange.running.done()
        engine.pause = None
        engine.serves.set()
        assert await exchange.status() == 200
        return await (exchange.rest() if stream else exchange.part())

    assert b"error" not in within_limit(scenario()).replace(b'"error":null', b"")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 3}])
def test_a_request_that_has_waited_too_long_is_told_when_to_come_back(path: str, body: dict[str, Any]) -> None:
    if "n" in body and path == RESPONSES:
        return
    recorder = Recorder()
    refusal = EngineRestarting("engines are started again.", retry_after_s=2.25)
    app = app_of(FakeEngine(pause=paused(), refusal=refusal), observer=recorder)
    answer = post(app, path, {**BODIES[path], **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (503, "engine_restarting", "server_error")
    assert (error["message"], answer.headers["retry-after"]) == ("engines are started again.", "3")
    assert "error" in recorder.reasons


def test_those_that_wait_count_in_the_queue() -> None:
    async def burst() -> list[tuple[int, str | None]]:
        engine = CrowdedEngine(pause=paused(), serves=asyncio.Event())
        app, several = app_of(engine, max_waiting_requests=3), 8
        async with client_of(app) as client:
            posts = [asyncio.create_task(client.post(COMPLETIONS, json=BODIES[COMPLETIONS])) for _ in range(several)]
            while sum(sent.done() for sent in posts) < several - 3:
                await asyncio.sleep(0)
            assert len(engine.alive) == 3
            assert engine.serves is not None
            engine.pause = None
            engine.serves.set()
            answers = [await sent for sent in posts]
        return [(each.status_code, each.json().get("error", {}).get("code")) for each in answers]

    told = within_limit(burst())
    assert (told.count((200, None)), told.count((503, "queue_full"))) == (3, 5)


def test_a_profile_cannot_be_taken_meanwhile() -> None:
    class Engine(FakeEngine):
        async def start_profile(self) -> None:
            raise EngineRestarting("engines are started again.", retry_after_s=4.0)

    engine = Engine(profile_failure=EngineRestarting("engines are started again.", retry_after_s=4.0))
    for path in ("/start_profile", "/stop_profile"):
        answer = call(app_of(engine, profiles=True), "POST", path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
        assert answer.headers["retry-after"] == "4"


# -- the request that kills engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_a_poisonous_request_is_told_so(path: str) -> None:
    poisonous = PoisonousRequest("the request has killed an engine.")
    for body in ({}, {"stream": True}):
        answer = post(FakeEngine(fail_after=0, failure=poisonous), path, {**BODIES[path], **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["message"]) == (500, "poisonous_request", str(poisonous))
        assert body.get("stream") or answer.headers["x-should-retry"] == "false"
    begun = FakeEngine(reply=says("Hello there"), fail_after=2, failure=poisonous)
    text = post(begun, path, {**BODIES[path], "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    if path == RESPONSES:
        assert (events[-2]["type"], events[-2]["code"]) == ("error", "poisonous_request")
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"] == {"code": "server_error", "message": str(poisonous)}
    else:
        assert (events[-1]["error"]["code"], events[-1]["error"]["message"]) == ("poisonous_request", str(poisonous))
        assert text.endswith("data: [DONE]\n\n")


# -- streams that pause --------------------------------------------------------------------------------------------


def test_the_usual_time_between_comments() -> None:
    assert Service.comment_s == 10.0


def nameless(stream: bytes) -> bytes:
    """A stream without identities and times, which differ each time."""
    return re.sub(rb"(?<=[-_])[0-9a-f]{32}|\d{10}", b"", stream)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_pauses_gets_comments_and_then_goes_on(path: str) -> None:
    async def scenario() -> tuple[bytes, int]:
        engine = FakeEngine(hold=asyncio.Event(), hold_after=1)
        assert engine.hold is not None
        exchange = await streaming(engine, path, comment_s=TICK_S)
        engine.pause = paused()
        got, comments = b"", 0
        while comments < 3:
            data = await exchange.part()
            got, comments = (got, comments + 1) if data == COMMENT else (got + data, comments)
        engine.pause = None
        engine.hold.set()
        rest = await exchange.rest()
        await exchange.running
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing may be sent after the end"
        return got + rest.replace(COMMENT, b""), rest.count(COMMENT)

    async def undisturbed() -> bytes:
        return await (await streaming(FakeEngine(), path)).rest()

    whole, late = within_limit(scenario())
    assert nameless(whole) == nameless(within_limit(undisturbed()))
    assert whole.count(b"data: ") >= 3
    assert late <= 1, "none comes once engines serve, but for the one that was being sent"


def test_a_comment_is_one_by_the_standard() -> None:
    """A line that begins with a colon; the empty line after it dispatches no event, as there are no data."""
    line, end, rest = COMMENT.split(b"\n")
    assert (line[:1], end, rest) == (b":", b"", b"")


def test_no_stream_gets_comments_while_engines_serve() -> None:
    class Asked(FakeEngine):
        """Counts how often a stream asks whether it pauses."""

        asked = 0

        @property
        def pause(self) -> Pause | None:  # type: ignore[override]
            self.asked += 1
            return None

        @pause.setter
        def pause(self, _: Pause | None) -> None: ...

    async def scenario() -> bytes:
        engine = Asked(hold=asyncio.Event(), hold_after=1)
        assert engine.hold is not None
        exchange = await streaming(engine, COMPLETIONS, comment_s=TICK_S)
        before = engine.asked
        while engine.asked < before + 3:
            await asyncio.sleep(0)
        engine.hold.set()
        return await exchange.rest()

    assert COMMENT not in within_limit(scenario())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_during_a_pause_is_noticed(path: str, begun: bool) -> None:
    async def scenario() -> None:
        recorder = Recorder()
        engine = FakeEngine(hold=asyncio.Event(), hold_after=1)
        app = app_of(engine, comment_s=TICK_S, observer=recorder)
        if not begun:
            engine.pause, engine.serves = paused(), asyncio.Event()
        exchange = Exchange(app, path, {**BODIES[path], "stream": True})
        if begun:
            assert await exchange.status() == 200
            engine.pause = paused()
            while await exchange.part() != COMMENT:
                pass
        while not engine.alive:
            await asyncio.sleep(0)
        await exchange.leave()
        assert not engine.alive
        assert len(engine.aborted) == 1
        assert recorder.reasons == ["abort"]

    within_limit(scenario())


def test_openais_client_reads_over_comments() -> None:
    import openai

    async def recorded() -> bytes:
        engine = FakeEngine(hold=asyncio.Event(), hold_after=1)
        assert engine.hold is not None
        exchange = await streaming(engine, COMPLETIONS, comment_s=TICK_S)
        engine.pause, parts = paused(), [b""]
        while parts[-1] != COMMENT:
            parts.append(await exchange.part())
        engine.pause = None
        engine.hold.set()
        return b"".join(parts) + await exchange.rest()

    content = within_limit(recorded())
    assert COMMENT in content
    answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=content)
    http = httpx.Client(transport=httpx.MockTransport(lambda _: answer))
    with openai.OpenAI(base_url="http://test/v1", api_key="k", http_client=http) as client:
        chunks = list(client.completions.create(model="tiny", prompt="a", stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]
