"""Settings of the server that change its answers, each a flag of `ubatch serve`; the ids of requests, and their log."""

import io
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from api_clients import ASKS, CHAT, COMPLETIONS, app_of, app_with, call, chat, complete, post, refused, stream
from fake_engine import FakeEngine

from serving.api.request_log import RequestLog
from serving.logs import configure_logging
from serving.requests import EngineDead
from serving.text.chat_template import read_template
from ubatch import ConfigError

# -- log-probabilities, usage, roles -----------------------------------------------------------------------------


@pytest.mark.parametrize("most", [5, 20, 50])
@pytest.mark.parametrize(
    ("path", "name", "beside"),
    [
        (COMPLETIONS, "logprobs", {}),
        (COMPLETIONS, "prompt_logprobs", {}),
        (CHAT, "top_logprobs", {"logprobs": True}),
        (CHAT, "prompt_logprobs", {}),
    ],
)
def test_so_many_likeliest_tokens_are_told_and_no_more(most: int, path: str, name: str, beside: dict[str, Any]) -> None:
    app = app_of(FakeEngine(), max_logprobs=most)
    body = {**ASKS[path], **beside, "max_tokens": 1}
    assert post(app, path, {**body, name: most}).status_code == 200
    error = refused(app, path, {**body, name: most + 1})
    message = f"{name}: {most + 1} likeliest tokens; this server returns at most {most}."
    assert (error["param"], error["message"]) == (name, message)


@pytest.mark.long
def test_the_schema_has_the_limit() -> None:
    app = app_of(FakeEngine(), described=True, max_logprobs=7)
    schemas = call(app, "GET", "/openapi.json").json()["components"]["schemas"]
    for schema, name in (("CompletionRequest", "logprobs"), ("ChatCompletionRequest", "top_logprobs")):
        assert {each.get("maximum") for each in schemas[schema]["properties"][name]["anyOf"]} == {7, None}


def test_tokens_are_named_by_their_ids_unless_a_request_says_otherwise() -> None:
    app = app_of(FakeEngine(), tokens_as_ids=True)
    asked = {"logprobs": 1, "max_tokens": 1}
    assert complete(app, asked)["choices"][0]["logprobs"]["tokens"] == ["token_id:300"]
    own = complete(app, {**asked, "return_tokens_as_token_ids": False})
    assert own["choices"][0]["logprobs"]["tokens"] != ["token_id:300"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_stream_ends_with_its_usage(path: str) -> None:
    asked = {"max_tokens": 2}
    assert "usage" not in stream(FakeEngine(), path, asked)[-1]
    *events, last = stream(app_of(FakeEngine(), force_usage=True), path, asked)
    assert last["usage"]["completion_tokens"] == 2
    assert all(event["usage"] is None for event in events)


def test_a_chats_answers_have_another_role() -> None:
    app = app_of(FakeEngine(), response_role="bot")
    assert chat(app, {"max_tokens": 1})["choices"][0]["message"]["role"] == "bot"
    assert stream(app, CHAT, {"max_tokens": 1})[0]["choices"][0]["delta"]["role"] == "bot"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    continued = chat(app, {"max_tokens": 1, "messages": messages, "continue_final_message": True})
    assert continued["choices"][0]["message"]["role"] == "assistant"  # the message's own


# -- the chat template -------------------------------------------------------------------------------------------


def test_variables_of_the_template_are_given_unless_a_request_has_them() -> None:
    engine = FakeEngine()
    app = app_with("{{ messages[0].content }} {{ mood }} {{ colour }}", engine)
    app.state.service.template_kwargs = {"mood": "good", "colour": "red"}
    decode = app.state.service.tokenizer.decode
    chat(app, {"max_tokens": 1})
    chat(app, {"max_tokens": 1, "chat_template_kwargs": {"mood": "bad"}})
    assert [decode(each.token_ids) for each in engine.requests] == ["Hello good red", "Hello bad red"]


def test_a_template_is_a_file_or_itself(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert read_template(str(tmp_path / "chat.jinja")) == "{{ messages }}"
    assert read_template("{% for m in messages %}") == "{% for m in messages %}"
    (tmp_path / "picture").write_bytes(b"\xff\xfe")
    for given, why in ((tmp_path / "nowhere", "No such file"), (tmp_path, "Is a dir"), (tmp_path / "picture", "UTF-8")):
        with pytest.raises(ConfigError, match=f"--chat-template .* cannot be read: .*{why}"):
            read_template(str(given))


# -- the defaults of requests ------------------------------------------------------------------------------------


def test_requests_without_a_seed_get_theirs_from_the_servers() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        engine = FakeEngine()
        app = app_of(engine, seed=seed)
        for body in ({}, {"n": 2}, {"seed": 5}, {}):
            complete(app, {"max_tokens": 1, **body})
        return [request.params.seed for request in engine.requests]

    first, second, third, own, last = seeds(1)
    assert own == 5
    assert second is not None
    assert third == second + 1
    assert len({first, second, own, last}) == 4
    assert seeds(1) == [first, second, third, own, last] != seeds(2)
    assert seeds(None) == [None, None, None, 5, None]


# -- HTTP --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_proxys_path_in_front() -> None:
    app = app_of(FakeEngine(), root_path="/models/a", api_key="hush")
    assert call(app, "GET", "/models/a/health").status_code == 200  # needs no key
    assert call(app, "GET", "/models/a/v1/models").status_code == 401
    key = {"Authorization": "Bearer hush"}
    for path in ("/models/a/v1/models", "/v1/models"):  # whether or not the proxy takes it off
        assert call(app, "GET", path, headers=key).status_code == 200
    assert call(app, "GET", "/openapi.json").json()["servers"] == [{"url": "/models/a"}]


@pytest.mark.long
def test_the_description_can_be_left_out() -> None:
    for describes, status in ((True, 200), (False, 404)):
        app = app_of(FakeEngine(), described=True, describes=describes)
        assert {call(app, "GET", path).status_code for path in ("/docs", "/redoc", "/openapi.json")} == {status}


def test_pages_in_browsers_may_call_if_their_site_is_allowed() -> None:
    allowed = {"allow_origins": ("https://a.example",), "allow_methods": ("POST",), "allow_headers": ("*",)}
    app = app_of(FakeEngine(), cross_origin=allowed, api_key="hush")

    def asked_first(origin: str, method: str = "POST") -> tuple[int, str | None]:
        asks = {"Origin": origin, "Access-Control-Request-Method": method}
        response = call(app, "OPTIONS", COMPLETIONS, headers=asks)
        return response.status_code, response.headers.get("access-control-allow-origin")

    assert asked_first("https://a.example") == (200, "https://a.example")  # without the key, which no browser sends
    assert asked_first("https://a.example", "PUT")[0] == 400
    assert asked_first("https://b.example") == (400, None)
    answered = call(app, "GET", "/health", headers={"Origin": "https://a.example"})
    assert answered.headers["access-control-allow-origin"] == "https://a.example"
    assert call(app, "POST", COMPLETIONS, headers={"Origin": "https://a.example"}).status_code == 401
    plain = call(app_of(FakeEngine()), "GET", "/health", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in plain.headers


BODY = {"prompt": "secret plan", "max_tokens": 2}
IDENTIFIED = {"X-Request-Id": "mine-1"}


@pytest.fixture
def log(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    stream, root, ours = io.StringIO(), logging.getLogger(), logging.getLogger("serving")
    before = root.level, ours.level, list(root.handlers)
    configure_logging(getattr(request, "param", "info"), "api", stream)
    yield stream
    root.setLevel(before[0])
    ours.setLevel(before[1])
    root.handlers[:] = before[2]


def test_the_clients_id_comes_back_and_others_get_one() -> None:
    app = app_of(FakeEngine())
    assert call(app, "GET", "/health", headers=IDENTIFIED).headers["x-request-id"] == "mine-1"
    made = [call(app, "GET", "/health").headers["x-request-id"] for _ in range(2)]
    assert len({*made}) == 2
    for wrong in ("", "a b", "x" * 200, "a\tb"):
        assert call(app, "GET", "/health", headers={"X-Request-Id": wrong}).headers["x-request-id"] != wrong
    silent = app_of(FakeEngine(), around=partial(RequestLog, headers=False))
    assert "x-request-id" not in call(silent, "GET", "/health", headers=IDENTIFIED).headers


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/nowhere", {}, 404), (COMPLETIONS, {}, 400), (COMPLETIONS, {**BODY, "model": "other"}, 404)],
)
def test_errors_say_which_request_it_was(path: str, body: Any, status: int) -> None:
    response = post(FakeEngine(), path, body, headers=IDENTIFIED)
    assert response.status_code == status
    assert response.json()["error"]["request_id"] == response.headers["x-request-id"] == "mine-1"


def test_so_do_unexpected_errors_a_missing_key_and_errors_in_a_stream(log: io.StringIO) -> None:
    engine = FakeEngine(fail_after=0, failure=ZeroDivisionError("inside"))
    response = post(engine, COMPLETIONS, BODY, headers=IDENTIFIED)
    assert (response.status_code, response.json()["error"]["request_id"]) == (500, "mine-1")
    assert response.headers["x-request-id"] == "mine-1"
    assert "a request failed request_id=mine-1" in log.getvalue()
    response = post(app_of(FakeEngine(), api_key="key"), COMPLETIONS, BODY, headers=IDENTIFIED)
    assert (response.status_code, response.json()["error"]["request_id"]) == (401, "mine-1")
    engine = FakeEngine(fail_after=1, failure=EngineDead("gone"))
    *_, last = stream(engine, COMPLETIONS, BODY, headers=IDENTIFIED)
    assert last["error"]["request_id"] == "mine-1"


def test_the_access_log_names_every_request_and_no_secrets(log: io.StringIO) -> None:
    app = app_of(FakeEngine(), around=partial(RequestLog, access_log=True), api_key="hidden-key")
    headers = {"Authorization": "Bearer hidden-key", **IDENTIFIED}
    call(app, "POST", f"{COMPLETIONS}?token=hidden-too", json=BODY, headers=headers)
    call(app, "GET", "/no%0Awhere%1b", headers=headers)
    lines = log.getvalue().splitlines()
    assert len(lines) == 2
    for line, status in zip(lines, (200, 404), strict=True):
        assert "answered client=127.0.0.1 method=" in line
        assert f"status={status} seconds=" in line
        assert line.endswith("request_id=mine-1")
    assert f"path={COMPLETIONS} " in lines[0]
    assert r'path="/no\nwhere\u001b"' in lines[1]
    assert "hidden" not in log.getvalue()
    assert "secret plan" not in log.getvalue()
    before = len(lines)
    call(app_of(FakeEngine()), "GET", "/health")
    assert len(log.getvalue().splitlines()) == before


@pytest.mark.parametrize("log", ["info", "debug"], indirect=True)
def test_what_is_asked_for_is_logged_if_wanted(log: io.StringIO) -> None:
    app = app_of(FakeEngine(), log_requests=True, max_log_len=2)
    answer = post(app, COMPLETIONS, {**BODY, "prompt": [5, 6, 7], "n": 2}, headers=IDENTIFIED).json()
    lines = log.getvalue().splitlines()
    received = [line for line in lines if "request received" in line]
    assert len(received) == 2
    for index, line in enumerate(received):
        assert f"output={answer['id']}-{index} prompt_tokens=3" in line
        assert "max_tokens=2" in line
        assert line.endswith("request_id=mine-1")
    prompts = [line for line in lines if " prompt " in line]
    assert len(prompts) == (2 if logging.getLogger("serving").level == logging.DEBUG else 0)
    assert all('token_ids="[5, 6]" request_id=' in line for line in prompts)
