"""What `ubatch bench fairness` reckons, and a short run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from repository import TINY_MOE

from serving.cli import main
from serving.workbench.bench.server import fairness
from serving.workbench.bench.server import load as serve_load
from serving.workbench.bench.server.fairness import Options, Round, run
from serving.workbench.bench.server.load import ServedModel
from serving.workbench.bench.server.requests import Outcome, Server, Status, Task
from ubatch import UBatchError


def test_only_gaps_while_prompts_are_served_count() -> None:
    stream = Outcome(0, Status.OK, sent_s=1.0, latency_s=2.0, ttft_s=0.5, gaps_s=(0.1, 0.2, 0.3, 0.4))
    # Its tokens come at 1.5, 1.6, 1.8, 2.1 and 2.5.
    assert stream.gaps_between(1.7, 2.0) == [0.2, 0.3]
    assert stream.gaps_between(0.0, 9.0) == [0.1, 0.2, 0.3, 0.4]
    assert stream.gaps_between(5.0, 9.0) == [], "it had ended"


def test_a_visit_is_written_without_every_gap() -> None:
    visit = Round([10.0] * 99 + [20.0] * 2, [10.0] * 50 + [60.0] * 50, 7.0)
    assert (visit.p99_alone, visit.p99_mixed) == (20.0, 60.0)
    assert visit.as_json()["median_mixed_ms"] == 35.0


class _NoServer:
    """For an arm."""

    base_url = "http://none"


def fake_run(monkeypatch: pytest.MonkeyPatch, gap_s: float) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Let `run` measure nothing; returns what is sent, as (arm, prompts), while it runs."""
    sent: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
    arms: list[str] = []

    @contextmanager
    def running(model: Path, flags: list[str]) -> Iterator[_NoServer]:
        server = _NoServer()
        server.base_url = f"http://arm{len(arms)}"
        arms.append(server.base_url)
        yield server

    async def served(server: Server, name: str | None) -> ServedModel:
        return ServedModel("tiny", None)

    async def tokens(server: Server) -> list[int]:
        return list(range(100))

    async def send(server: Server, tasks: list[Task], *, max_concurrency: int | None = None) -> list[Outcome]:
        sent.append((server.base_url, tuple(tuple(map(int, task.prompt)) for task in tasks)))
        return [
            Outcome(task.index, Status.OK, task.start_s, 0.2, ttft_s=0.0, gaps_s=(gap_s,) * 4, output_tokens=5)
            for task in tasks
        ]

    monkeypatch.setattr(fairness, "running_server", running)
    monkeypatch.setattr(fairness, "served_model", served)
    monkeypatch.setattr(serve_load, "token_pool", tokens)
    monkeypatch.setattr(fairness, "send_and_check", send)
    monkeypatch.setattr(fairness._Arm, "overlapped", lambda arm: 0.0)
    return sent


def test_every_arm_of_a_sweep_gets_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = fake_run(monkeypatch, gap_s=0.1)
    run(Options(model=TINY_MOE, rounds=2))
    visits = [(sent[at][0], [prompts for _, prompts in sent[at : at + 3]]) for at in range(12, len(sent), 3)]
    assert len(visits) == 4 * 4
    sweeps = [visits[at : at + 4] for at in range(0, 16, 4)]
    for sweep in sweeps:
        assert len({arm for arm, _ in sweep}) == 4
        assert all(requests == sweep[0][1] for _, requests in sweep)
    assert len({str(sweep[0][1]) for sweep in sweeps}) == 4, "else the prefix cache has them"


def test_streams_that_end_before_the_first_prompt_comes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_run(monkeypatch, gap_s=0.001)
    with pytest.raises(UBatchError, match="raise --output-len"):
        run(Options(model=TINY_MOE, rounds=2))


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    file = tmp_path / "fairness.json"
    load = ["--streams", "4", "--output-len", "60", "--prompts", "3", "--limits", "64", "--rounds", "2"]
    assert main(["bench", "fairness", str(TINY_MOE), *load, "--json", str(file)]) == 0
    arms = json.loads(file.read_text())["arms"]
    assert [(arm["limit"], arm["dbo"]) for arm in arms] == [("off", False), ("64", False), ("off", True), ("64", True)]
    for arm in arms:
        assert len(arm["rounds"]) == 4
        assert arm["stretch"]["low"] <= arm["stretch"]["median"] <= arm["stretch"]["high"]
        assert (arm["overlapped"] > 0) == (arm["dbo"] and arm["limit"] == "off"), "64 tokens are below the threshold"
    assert arms[0]["throughput"]["median"] == arms[2]["throughput"]["median"] == 1.0
