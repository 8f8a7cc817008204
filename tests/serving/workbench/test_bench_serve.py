"""The load generator, against a stand-in for the server."""

import asyncio
import json
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai_stub import VOCABULARY, Stub, Wrong, running_stub
from served import wait_until

from serving.arguments.parser import parse_options
from serving.workbench.bench.server.load import Dataset, Load, figures_of, make_tasks
from serving.workbench.bench.server.requests import (
    Endpoint,
    Outcome,
    RequestFailed,
    Server,
    Status,
    Task,
    send_all,
    send_and_check,
)
from serving.workbench.bench.server.serve import Options, run
from ubatch import ConfigError


@pytest.fixture(scope="module")
def server() -> Iterator[Stub]:
    with running_stub() as stub:
        yield stub


@pytest.fixture
def stub(server: Stub) -> Iterator[Stub]:
    """The server as it was at first."""
    fresh = Stub(url=server.url)
    vars(server).update(vars(fresh))
    yield server
    vars(server).update(vars(fresh))


def send(stub: Stub, tasks: list[Task], **arguments: Any) -> list[Outcome]:
    server = Server(stub.url, "stub", arguments.pop("endpoint", Endpoint.COMPLETIONS), arguments.pop("stream", True))
    return asyncio.run(send_all(server, tasks, **arguments))


def words(count: int) -> str:
    return "".join(f"w{index} " for index in range(count))


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("stream", [True, False])
def test_every_request_is_answered_and_measured(stub: Stub, endpoint: Endpoint, stream: bool) -> None:
    chat = endpoint is Endpoint.CHAT
    tasks = [Task(index, "a b c" if chat else [1, 2, 3], 4 + index % 3) for index in range(12)]
    outcomes = send(stub, tasks, endpoint=endpoint, stream=stream)
    for task, outcome in zip(tasks, outcomes, strict=True):
        assert (outcome.index, outcome.status, outcome.error) == (task.index, Status.OK, None)
        assert (outcome.prompt_tokens, outcome.output_tokens, outcome.counted) == (3, task.max_tokens, True)
        assert outcome.text == words(task.max_tokens)
        assert outcome.finish_reason == "length"
        if stream:
            assert 0 < outcome.ttft_s < outcome.latency_s
            assert len(outcome.gaps_s) == task.max_tokens - 1
            assert outcome.ttft_s + sum(outcome.gaps_s) <= outcome.latency_s
        else:
            assert (outcome.ttft_s, outcome.gaps_s, outcome.tpot_s) == (None, (), None)
    assert all(body["model"] == "stub" and body["stream"] is stream for body in stub.bodies)


@pytest.mark.parametrize("stream", [True, False])
def test_no_more_at_once_than_asked_for(stub: Stub, stream: bool) -> None:
    stub.pause_s = 0.01
    outcomes = send(stub, [Task(index, [1], 5) for index in range(12)], stream=stream, max_concurrency=3)
    assert stub.peak == 3
    assert max(outcome.sent_s for outcome in outcomes) > min(outcome.latency_s for outcome in outcomes)


def test_requests_wait_until_they_are_due(stub: Stub) -> None:
    outcomes = send(stub, [Task(0, [1], 1, start_s=0.3), Task(1, [1], 1)])
    assert outcomes[0].sent_s >= 0.3
    assert len(stub.bodies) == 2


def test_a_dropped_request_ends_on_the_server_too(stub: Stub) -> None:
    stub.pause_s = 0.01
    long = 2000  # tokens, 20 s: the server must not be done before it notices
    tasks = [Task(index, [1], long, cancel_after=3) if index % 2 else Task(index, [1], 100) for index in range(6)]
    outcomes = send(stub, tasks)
    assert [outcome.status for outcome in outcomes] == [Status.OK, Status.CANCELLED] * 3
    for outcome in outcomes[1::2]:
        assert words(long).startswith(outcome.text)
        assert 3 <= outcome.output_tokens < long
        assert not outcome.counted
    wait_until(lambda: stub.dropped == 3 and stub.active == 0, "the server notices", 60)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Wrong.REFUSED, "answers 400: not today"),
        (Wrong.ERROR_IN_STREAM, "the engine died"),
        (Wrong.NO_DONE, "without [DONE]"),
        (Wrong.NOT_JSON, "without [DONE]"),
    ],
)
def test_a_failure_is_counted_and_the_others_go_on(stub: Stub, wrong: Wrong, message: str) -> None:
    outcomes = send(stub, [Task(0, [1], 3), Task(1, [wrong], 3), Task(2, [1], 3)])
    assert [outcome.status for outcome in outcomes] == [Status.OK, Status.FAILED, Status.OK]
    assert message in str(outcomes[1].error)
    figures = figures_of(outcomes)
    assert (figures.ok, figures.failed, figures.first_error) == (2, 1, outcomes[1].error)
    with pytest.raises(RequestFailed, match="1 of 2 requests failed: "):
        asyncio.run(send_and_check(Server(stub.url, "stub"), [Task(0, [1], 3), Task(1, [wrong], 3)]))


def test_an_answer_that_is_not_json_fails(stub: Stub) -> None:
    (outcome,) = send(stub, [Task(0, [Wrong.NOT_JSON], 3)], stream=False)
    assert outcome.status is Status.FAILED
    assert "not an answer of the API" in str(outcome.error)


def test_figures() -> None:
    outcomes = [
        Outcome(0, Status.OK, 0.0, 2.0, 0.5, (0.5, 1.0), prompt_tokens=10, output_tokens=4, counted=True),
        Outcome(1, Status.OK, 1.0, 3.0, 1.5, (1.5,), prompt_tokens=20, output_tokens=2),
        Outcome(2, Status.CANCELLED, 1.0, 0.5, 0.25, (0.25,), output_tokens=2),
        Outcome(3, Status.FAILED, 3.0, 0.0, error="second"),
        Outcome(4, Status.FAILED, 2.0, 0.0, error="first"),
    ]
    figures = figures_of(outcomes)
    assert (figures.ok, figures.failed, figures.cancelled, figures.uncounted) == (2, 2, 1, 1)
    assert figures.first_error == "first"
    assert figures.duration_s == 4.0
    assert figures.requests_per_s == 0.5
    assert figures.output_tokens_per_s == 2.0
    assert figures.total_tokens_per_s == 9.5
    assert figures.ttft.median == 1000.0
    assert (figures.itl.mean, figures.itl.median) == (1000.0, 1000.0)
    assert (figures.tpot.mean, figures.tpot.p99) == (1000.0, pytest.approx(1490.0))
    assert (figures.e2e.median, figures.e2e.p90) == (2500.0, pytest.approx(2900.0))


def test_a_load_is_drawn_as_asked(stub: Stub) -> None:
    server = Server(stub.url, "stub")
    load = Load(num_prompts=400, request_rate=50.0, input_len=20, output_len=10, range_ratio=0.5, cancel_ratio=0.25)
    tasks = asyncio.run(make_tasks(server, load))
    assert tasks == asyncio.run(make_tasks(server, load))
    gaps = [b.start_s - a.start_s for a, b in pairwise(tasks)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50.0, rel=0.15)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50.0, rel=0.3)  # exponential: as wide as its mean
    assert {len(task.prompt) for task in tasks} == set(range(10, 31))
    assert {task.max_tokens for task in tasks} == set(range(5, 16))
    assert {token for task in tasks for token in task.prompt if isinstance(token, int)} == set(range(VOCABULARY))
    dropped = [task for task in tasks if task.cancel_after is not None]
    assert len(dropped) == 100
    assert all(1 <= (task.cancel_after or 0) < task.max_tokens for task in dropped)


def test_words_need_no_tokenizer(stub: Stub) -> None:
    stub.tokenize = False
    server = Server(stub.url, "stub")
    with pytest.raises(RequestFailed, match=r"/tokenize answers 404.*--dataset words"):
        asyncio.run(make_tasks(server, Load(num_prompts=2)))
    tasks = asyncio.run(make_tasks(server, Load(num_prompts=2, input_len=7, dataset=Dataset.WORDS)))
    assert all(isinstance(task.prompt, str) and len(task.prompt.split()) == 7 for task in tasks)


@pytest.mark.parametrize("name", ["--url", "--base-url"])
def test_the_command_prints_and_writes(
    name: str, stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.api_key = "secret"
    file = tmp_path / "serve.json"
    flags = [name, stub.url + "/v1/", "--api-key", "secret", "--num-prompts", "10", "--input-len", "8"]
    flags += ["--output-len", "6", "--cancel-ratio", "0.2", "--ignore-eos", "--endpoint", "chat", "--json", str(file)]
    flags += ["--request-rate", "inf", "--timeout-s", "inf"]
    assert run(parse_options(Options, "ubatch bench serve", "", flags)) == 0
    output = capsys.readouterr().out
    assert "10 requests to stub (chat, streamed)" in output
    assert "8 ok, 0 failed, 2 cancelled" in output
    for row in ("time to first token", "inter-token latency", "time per output token", "end to end", "p99"):
        assert row in output
    written = json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert written["figures"]["ok"] == 8
    assert len(written["requests"]) == 10
    assert "secret" not in file.read_text(encoding="utf-8")
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in stub.bodies)
    assert all(len(body["messages"][0]["content"].split()) == 8 for body in stub.bodies)


def test_answers_without_usage_are_counted_by_events(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.usage = False
    options = Options(url=stub.url, num_prompts=3, output_len=5, request_rate=200.0)
    assert run(options) == 0
    assert "3 answers without `usage`" in capsys.readouterr().out


def test_a_failed_request_is_exit_status_1(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving.workbench.bench.server.load.Load.lengths", lambda self, rng: (1, 1))
        patch.setattr("random.Random.choices", lambda self, pool, k: [Wrong.REFUSED])
        assert run(Options(url=stub.url, num_prompts=2)) == 1
    output = capsys.readouterr().out
    assert "0 ok, 2 failed" in output
    assert "first error: RequestFailed" in output
    assert "not today" in output


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input_len": 500, "output_len": 13}, ConfigError, "513 tokens"),
        ({"model": "gpt"}, ConfigError, "does not serve 'gpt', but stub, other"),
        ({"url": "http://127.0.0.1:9"}, RequestFailed, "cannot reach http://127.0.0.1:9"),
    ],
)
def test_what_cannot_work_is_said_first(
    stub: Stub, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(Options(**{"url": stub.url, **changes}))
    assert stub.bodies == []


def test_a_wrong_key_is_said(stub: Stub) -> None:
    stub.api_key = "secret"
    with pytest.raises(RequestFailed, match="answers 401: wrong key"):
        run(Options(url=stub.url, api_key="guess"))
