"""`ubatch bench faults`: what counts as lost, wrong or excused, what has grown, and a short run of it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import TINY_MOE

from model_runner import SamplingParams
from model_runner.sampling.rows import uniform
from serving.workbench.bench.faults import shared
from serving.workbench.bench.faults.answers import KINDS, Answer, Asked, Choice, make_requests, with_stops
from serving.workbench.bench.faults.command import Options, run
from serving.workbench.bench.faults.pause import errors_at, tokens_after
from serving.workbench.bench.faults.referee import (
    Difference,
    Tally,
    Verdict,
    first_differences,
    may_differ,
    missing,
    same_logprobs,
)
from serving.workbench.bench.server.process import Ended, Footprint

TOKENS = [5, 6, 7, 8]


def answer(tokens: Sequence[int] = TOKENS, text: str = "a b c d", end: str | None = "length", **own: Any) -> Answer:
    choice = Choice(text, list(tokens), own.pop("logprobs", []), end)
    return Answer([choice], own.pop("counted", len(tokens)), **own)


def asked(**fields: Any) -> Asked:
    return Asked("plain", (1, 2, 3), True, {"max_tokens": 4, "temperature": 0, **fields})


# -- whole answers


@pytest.mark.parametrize(
    ("got", "fields", "why"),
    [
        (answer(), {}, None),
        (answer([5, 6], end="stop"), {}, None),
        (answer(logprobs=[-1.0] * 4), {"logprobs": 1}, None),
        (answer(error="RequestFailed: rank 0 was killed"), {}, "rank 0 was killed"),
        (answer(end=None), {}, "ends with None"),
        (answer([5, 6, 7]), {}, "has 3 tokens of 4"),
        (answer([5, 6, 7, 7, 8]), {}, "has 5 tokens of 4"),
        (answer(counted=5), {}, "counts 5 tokens, but 4 came"),
        (answer(counted=None), {}, "counts None tokens"),
        (answer(logprobs=[-1.0] * 3), {"logprobs": 1}, "3 log-probabilities of 4 tokens"),
    ],
)
def test_an_answer_that_is_not_whole_is_lost(got: Answer, fields: dict[str, Any], why: str | None) -> None:
    found = missing(asked(**fields), got)
    assert found is None if why is None else found is not None and why in found


@pytest.mark.parametrize(
    ("got", "found"),
    [
        (answer(), []),
        (answer([5, 6, 9, 8]), [Difference(0, 2, 7, 9)]),
        (answer([5, 6]), [Difference(0, 2, 7, None)]),
        (answer([5, 6, 7, 8, 9]), [Difference(0, 4, None, 9)]),
        (answer(text="a b c c d"), [Difference(0, 4, None, None)]),
        (answer(end="stop"), [Difference(0, 4, None, None)]),
    ],
)
def test_the_first_difference(got: Answer, found: list[Difference]) -> None:
    assert first_differences(answer(), got) == found


# -- what rounding excuses

LOGITS = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1]).log()
EDGES = (0.5, 0.7, 0.8)


PENALTY = math.log(0.5) - math.log(0.1)


@pytest.mark.parametrize(
    ("expected", "got", "draw", "params", "excused"),
    [
        pytest.param(2, 3, None, {}, True, id="greedy, the two tie"),
        pytest.param(0, 1, None, {}, False, id="greedy, they do not"),
        pytest.param(2, None, None, {}, False, id="one ends"),
        pytest.param(0, 2, None, {"frequency_penalty": PENALTY}, True, id="a penalty makes them tie"),
        pytest.param(0, 2, None, {}, False, id="no penalty does"),
        *(pytest.param(0, 4, edge, {}, True, id=f"near the edge at {edge}") for edge in EDGES),
        *(pytest.param(0, 4, edge + 0.01, {}, False, id=f"beside the edge at {edge}") for edge in EDGES),
        pytest.param(2, 1, 0.6, {}, True, id="the undisturbed server gives the other, too"),
        pytest.param(1, 2, 0.6, {}, False, id="it gives the same"),
        pytest.param(1, 0, None, {}, True, id="greedy, the other is the likeliest"),
        pytest.param(0, 1, 0.25, {"top_p": 0.70005}, True, id="near top-p"),
        pytest.param(0, 1, 0.25, {"top_p": 0.75}, False, id="far from top-p"),
        pytest.param(0, 1, 0.25, {"top_k": 3}, True, id="the third and the fourth tie"),
        pytest.param(0, 1, 0.25, {"top_k": 2}, False, id="the second and the third do not"),
        pytest.param(0, 1, 0.25, {"min_p": 0.40005}, True, id="near min-p"),
        pytest.param(0, 1, 0.25, {"min_p": 0.3}, False, id="far from min-p"),
    ],
)
def test_a_difference_is_excused_where_rounding_decides(
    expected: int, got: int | None, draw: float | None, params: dict[str, Any], excused: bool
) -> None:
    """Greedily if `draw` is None; else by a seed whose draw is as near to it as rounding is to an edge."""
    seed = 0
    if draw is not None:
        params = {"temperature": 1.0, **params}
        seed = next(seed for seed in range(10**6) if abs(uniform(seed, 2) - draw) < 5e-5)
    assert may_differ(LOGITS, SamplingParams(**params), (1,), (0, 1), seed, Difference(0, 2, expected, got)) is excused


def test_log_probabilities_show_what_has_no_reference() -> None:
    choice = Choice(tokens=TOKENS, logprobs=[-1.0, -2.0, -3.0, -4.0])
    assert same_logprobs(choice, [-1.0, -2.0005, -3.0, -4.0]) is None
    assert "token 1" in (same_logprobs(choice, [-1.0, -2.5, -3.0, -4.0]) or "")


# -- the requests


def test_every_kind_is_asked_in_every_way() -> None:
    made = make_requests(range(10, 99), 64, 200)
    assert made == make_requests(range(10, 99), 64, 200)
    ways = {(each.kind, each.stream, each.sampled) for each in made}
    assert len(ways) == 4 * len(KINDS)
    assert sum(each.stream for each in made) == sum(each.sampled for each in made) == 32
    assert {each.kind for each in made if not each.repeats} >= {"two outputs", "truncated", "json schema"}
    assert all("logprobs" in each.fields for each in made if not each.repeats)


def test_stops_are_taken_from_the_answers() -> None:
    made = make_requests(range(10, 99), 32, 8)
    answers = [Answer([Choice("0123456789abcdef", list(range(8)))] * each.outputs) for each in made]
    stopped = with_stops(made, answers)
    assert {each.fields["stop"][0] for each in stopped if each.kind == "stop string"} == {"abcdef"}
    assert {each.fields["min_tokens"] for each in stopped if each.kind == "min_tokens"} == {6}
    assert all(one == other for one, other in zip(made, stopped, strict=True) if one.kind == "plain")


# -- what was promised


def tally(**counts: int) -> Tally:
    found = Tally()
    for name, count in counts.items():
        for _ in range(count):
            found.add(Verdict(name), "why")
    return found


@pytest.mark.parametrize(
    ("counts", "fault"),
    [
        ({"equal": 300, "excused": 3}, None),
        ({"equal": 10, "excused": 1}, None),
        ({"equal": 300, "excused": 4}, "4 of 304 texts differ"),
        ({"equal": 300, "wrong": 1}, "1 of 301 requests got another text: wrong: why"),
        ({"equal": 300, "lost": 2}, "2 of 302 requests were lost"),
        ({}, "no request was answered"),
    ],
)
def test_lost_and_wrong_answers_are_faults(counts: dict[str, int], fault: str | None) -> None:
    found = shared.faults_of_answers(tally(**counts), exact=True)
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]


def test_in_bfloat16_texts_may_differ_but_not_be_lost() -> None:
    assert not shared.faults_of_answers(tally(equal=1, wrong=9), exact=False)
    assert shared.faults_of_answers(tally(equal=1, lost=1), exact=False)


def test_what_is_left_over_is_a_fault() -> None:
    assert not shared.faults_of_end(Ended(0, [], []))
    assert "1 processes" in shared.faults_of_end(Ended(0, ["7 python"], []))[0]
    assert "files" in shared.faults_of_end(Ended(0, [], ["ubatch-x"]))[0]
    assert "status None" in shared.faults_of_end(Ended(None, [], []))[0]
    assert not shared.faults_of_end(Ended(1, [], []), status=1)


def test_restarts_are_counted() -> None:
    assert not shared.faults_of_restarts({"killed": 4, "resumed": 9}, 5)
    assert shared.faults_of_restarts({"killed": 6, "resumed": 9}, 5)
    assert len(shared.faults_of_restarts({}, 5)) == 2


# -- growth


def test_a_trend_has_an_interval() -> None:
    assert shared.trend([1.0, 2.0, 3.0]) is None
    line: Any = shared.trend([1.0, 2.0, 3.0, 4.0, 5.0])
    assert [line.growth, line.low, line.high] == pytest.approx([4.0] * 3)


@pytest.mark.parametrize(
    ("resident", "threads", "grown"),
    [
        ([200, 201, 199, 200, 201, 200], [9] * 6, ()),
        ([200, 202, 204, 206, 208, 210], [9] * 6, ("resident",)),
        ([200, 230, 200, 230, 200, 230], [9] * 6, ()),
        ([200] * 6, [9, 10, 11, 12, 13, 14], ("threads",)),
        ([200] * 20, [7 + step for step in range(20)], ("threads",)),
        ([200] * 20, [7] * 6 + [8] * 14, ()),
        ([200] * 20, [8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 11, 11, 11, 11, 11, 11, 12, 12, 12, 12], ()),  # a pool's
    ],
)
def test_what_grows_is_a_fault(resident: list[int], threads: list[int], grown: tuple[str, ...]) -> None:
    series = [Footprint(mb * 10**6, 30, number) for mb, number in zip(resident, threads, strict=True)]
    assert tuple(fault.split()[0] for fault in shared.faults_of_series(series)) == grown


# -- pauses


def test_the_log_says_when_a_failure_was_noticed() -> None:
    log = (
        "1970-01-02 00:00:01.250 INFO    api engine rank=0 pid=7\n"
        "1970-01-02 00:00:02.500 ERROR   api engine failed rank=0\n"
        "1970-01-02 00:00:03.000 ERROR   rank 1 engine failed\n"
    )
    assert errors_at(log) == [86402.5]


def test_the_next_token_is_the_first_after_the_failure() -> None:
    assert tokens_after([[1.0, 2.0, 3.5, 4.0], [0.5, 3.25]], 3.0) == [3.5, 3.25]
    assert tokens_after([[1.0, 2.0], [3.25]], 3.0) is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engines_are_killed_and_no_request_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "faults.json"
    status = run(Options(model=TINY_MOE, only=("kill", "poison"), quick=True, json_file=file))
    assert status == 0, capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["kill"][0]["answers"]["lost"] == 0
    assert {each["code"] for each in written["poison"]} == {"poisonous_request"}
