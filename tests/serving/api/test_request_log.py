"""Every request has an id, in the log, in the answer's header and in errors; what is logged of it, and what is not."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from api_clients import COMPLETIONS, MODEL, app_of, call, events_of, post
from fake_engine import FakeEngine

from serving.api.request_log import RequestLog
from serving.logs import configure_logging
from serving.requests import EngineDead

BODY = {"model": MODEL, "prompt": "secret plan", "max_tokens": 2}
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
    *_, last = events_of(post(engine, COMPLETIONS, {**BODY, "stream": True}, headers=IDENTIFIED))
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
