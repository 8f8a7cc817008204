"""`ubatch bench abuse`: what it counts as wrong, and a short run of all of it."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai_stub import running_stub
from repository import TINY_MOE
from safetensors.torch import load_file

from serving.workbench.bench.server.abuse import checks
from serving.workbench.bench.server.abuse.attacks import ATTACKS, Target
from serving.workbench.bench.server.abuse.checks import Reference, Seen, Watch
from serving.workbench.bench.server.abuse.command import Options, poisoned_copy, run
from serving.workbench.bench.server.requests import Outcome, RequestFailed, Server, Status, Task, send
from ubatch import ConfigError
from ubatch.errors import shown


def test_the_poisoned_copy_computes_all_but_one_token(tmp_path: Path) -> None:
    token = poisoned_copy(TINY_MOE, tmp_path)
    before, after = load_file(TINY_MOE / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    embedding = before["model.embed_tokens.weight"]
    assert token == len(embedding) - 1
    assert torch.equal(after["model.embed_tokens.weight"][:token], embedding[:token])
    assert after["model.embed_tokens.weight"][token].isnan().all()
    assert torch.equal(after["lm_head.weight"], embedding)  # it was tied
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in TINY_MOE.iterdir()}


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a checkpoint"):
        poisoned_copy(tmp_path, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="embed_tokens"):
        poisoned_copy(tmp_path, tmp_path)


def outcome(text: str, tokens: int = 3, finish_reason: str = "length") -> Outcome:
    return Outcome(0, Status.OK, 0.0, 1.0, text=text, output_tokens=tokens, finish_reason=finish_reason)


@pytest.mark.parametrize(
    ("ties", "text", "allowed"),
    [
        ((), "one two", True),
        ((), "one tow", False),
        ((), "one", False),
        ((4,), "one tow", True),
        ((3,), "one tow", True),
        ((6,), "one tow", False),
        ((4,), "eno two", False),
    ],
)
def test_a_text_is_wrong_unless_it_leaves_at_a_tie(ties: tuple[int, ...], text: str, allowed: bool) -> None:
    reference = Reference((1,), 3, "one two", ties)
    assert reference.allows(outcome(text)) is allowed
    assert not reference.allows(outcome(text, tokens=2))
    assert not reference.allows(outcome(text, finish_reason="stop"))


def test_streams_are_watched_window_by_window() -> None:
    async def watch(base_url: str) -> list[Any]:
        server = Server(base_url, "stub")
        references = [Reference((1,), 3, "w0 w1 w2 "), Reference((2,), 3, "w0 w1 w3 ")]
        async with Watch(server, references) as watch:
            first = await watch.during("first", 0.5)
            second = await watch.during("second", asyncio.sleep(0.5))
        return [(window, watch.seen(window)) for window in (first, second)]

    with running_stub() as stub:
        stub.pause_s = 0.01
        windows = asyncio.run(watch(stub.url))
        stub.pause_s = 0.0
    for window, seen in windows:
        assert seen.ended > 2
        assert 0 < seen.wrong < seen.ended  # the second reference is never met
        assert not seen.failed
        assert 0.01 <= seen.gap_median_s < 0.2
        assert window.unhealthy == ["404"] * len(window.health_s)  # the stand-in has no `/health`


def test_metrics_that_do_not_say_what_is_held_are_an_error() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text="vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")

    class Told(Server):
        def client(self) -> httpx.AsyncClient:
            return httpx.AsyncClient(base_url=self.base_url, transport=httpx.MockTransport(answer))

    with pytest.raises(RequestFailed, match="has no vllm:kv_cache_usage_perc"):
        asyncio.run(checks.rest(Told("http://here")))


def test_a_stream_that_was_read_to_its_end_leaves_its_connection() -> None:
    async def ask(base_url: str) -> list[bool]:
        server = Server(base_url, "stub")
        async with server.client() as client:
            for _ in range(3):
                await send(server, client, Task(0, [1], 3), time.perf_counter())
            return [each.is_idle() for each in client._transport._pool.connections]  # type: ignore[attr-defined]

    with running_stub() as stub:
        assert asyncio.run(ask(stub.url)) == [True]


def test_a_large_wrong_value_is_shown_without_being_looked_through() -> None:
    compared = 0

    class Key(str):
        def __lt__(self, other: str) -> bool:
            nonlocal compared
            compared += 1
            return str(self) < other

    assert shown({Key(str(number)): 1 for number in range(10_000)}).startswith("{'0': 1, ")
    assert compared < 1000


def test_attacks_are_named_once_and_fit_the_table() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 46
    statuses = {status for attack in ATTACKS for status in attack.answers if status.isdecimal()}
    assert {status for status in statuses if status >= "500"} == {"500", "503"}


def test_prompts_avoid_the_poisoned_token() -> None:
    target = Target(Server("http://here:8000", "m"), [1, 2, 3], 4, 64, 10, 1.0)
    assert set(target.prompt(100)) == {1, 2, 3}
    assert target.address == ("here", 8000)


FINE = Seen(ended=5, wrong=0, failed=(), tokens_per_s=100.0, gap_median_s=0.01, gap_p99_s=0.02)
ALONE = checks.Row("streams alone", 10.0, {}, (), (), 0.1, (), FINE)
ARRIVE = replace(ALONE, name="prompts arrive", answers={"200": 3}, waits_s=(0.5,))
ROUND = checks.Round(ok=60, cancelled=30, failed=0, wrong=0, held=None, resident=(100, 200, 200), first_error=None)
ROUNDS = [replace(ROUND, resident=(90, 90, 90)), ROUND]
HANG = checks.Hang(rank=1, unhealthy_s=9.0, errors=("rank 1 hangs",), ended_s=12.0, exit_status=1)
JUDGED: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "window": lambda broken: checks.faults_of_windows([ALONE, replace(ARRIVE, **broken)]),
    "round": lambda broken: checks.faults_of_rounds([*ROUNDS, replace(ROUND, **broken)], 90),
    "hang": lambda broken: checks.faults_of_hang(replace(HANG, **broken), timeout_s=10.0),
    "end": lambda broken: checks.faults_of_memory(**{"peak": 10**8, "overlapped": 5} | broken),
}


@pytest.mark.parametrize(
    ("what", "broken", "fault"),
    [
        ("window", {}, None),
        ("window", {"unexpected": ("no 503",)}, "prompts arrive: answered no 503"),
        ("window", {"unhealthy": ("503",)}, "/health gave 503"),
        ("window", {"health_s": 1.5}, "/health took 1.50 s"),
        ("window", {"waits_s": (0.1, 8.5)}, "a short request waited 8.50 s"),
        ("window", {"seen": replace(FINE, wrong=1)}, "1 streams got a wrong token"),
        ("window", {"seen": replace(FINE, failed=("503", "503"))}, "2 streams failed"),
        ("window", {"seen": replace(FINE, gap_p99_s=None, gap_median_s=None)}, "the streams stood still"),
        ("window", {"seen": replace(FINE, gap_p99_s=0.07)}, "inter-token p99 rose 3.50 times"),
        ("round", {}, None),
        ("round", {"ok": 59, "failed": 1, "first_error": "x"}, "round 3: 1 streams failed, the first with x"),
        ("round", {"ok": 59}, "round 3: 1 streams have no end"),
        ("round", {"ok": 90, "cancelled": 0}, "round 3: nobody left"),
        ("round", {"wrong": 2}, "round 3: 2 streams got a wrong token"),
        ("round", {"held": "3 blocks"}, "round 3: the engines hold 3 blocks"),
        ("round", {"resident": (106, 200, 200)}, "the API process grew"),
        ("round", {"resident": (100, 200, 211)}, "engine 1 grew"),
        ("hang", {}, None),
        ("hang", {"unhealthy_s": None}, "did not say in time"),
        ("hang", {"unhealthy_s": 16.0}, "did not say in time"),
        ("hang", {"errors": ("rank 1 hangs", "rank 0 hangs")}, "without the rank's name"),
        ("hang", {"exit_status": 0}, "ended with 0"),
        ("hang", {"exit_status": -9}, "ended with -9"),
        ("hang", {"exit_status": None, "ended_s": None}, "ended with None"),
        ("end", {}, None),
        ("end", {"peak": 2 * 10**9}, "the API process took 2.00 GB"),
        ("end", {"overlapped": 0}, "no step overlapped"),
    ],
)
def test_a_promise_that_is_broken_is_a_fault(what: str, broken: dict[str, Any], fault: str | None) -> None:
    faults = JUDGED[what](broken)
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]


def test_an_attack_that_was_refused_has_not_happened() -> None:
    assert all(attack.needs <= attack.answers for attack in ATTACKS)
    for part in ("leave", "do not read", "more connections", "arrive", "1,000 prompts in", "halves", "nan"):
        (needs,) = (attack.needs for attack in ATTACKS if part in attack.name)
        assert needs & {"200", "408", "500", "503"}, part


LOADS = ("1,000 prompts", "200 prompts")
"""Attacks by much work: what they are to show are times, which the command itself measures."""
PARTS = {
    "requests": tuple(each.name for each in ATTACKS[:11]),
    "connections": tuple(each.name for each in ATTACKS[11:] if not any(part in each.name for part in LOADS)),
}


@pytest.mark.slow
@pytest.mark.timeout(140)
@pytest.mark.parametrize("part", [*PARTS, "rounds"])
def test_a_server_keeps_its_promises(part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "abuse.json"
    options = Options(
        model=TINY_MOE,
        only=PARTS.get(part, ("paths",)),
        streams=16,
        alone_s=2,
        arrivals_s=5,
        rounds=3 if part == "rounds" else 0,
        round_streams=150,
        hang=part == "rounds",
        serve_flags="--dbo-decode-token-threshold 4",
        json_file=file,
    )
    status = run(options)
    assert status == 0, capsys.readouterr().out
    written = json.loads(file.read_text())
    names = [row["name"] for row in written["windows"]]
    attacked = [name for name in names if any(name == each.name for each in ATTACKS)]
    assert attacked == list(PARTS.get(part, ("paths that are off or none",)))
    if part == "rounds":
        assert len(written["rounds"]) == 3
        assert written["hang"]["exit_status"] == 1
