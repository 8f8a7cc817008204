"""What `ubatch bench fairness` reckons, and a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving.bench.fairness import Round, gaps_between
from serving.bench.serve_requests import Outcome, Status
from serving.cli import main

TINY = Path(__file__).parents[1] / "examples" / "models" / "tiny-moe"


def test_only_gaps_while_prompts_are_served_count() -> None:
    stream = Outcome(0, Status.OK, sent_s=1.0, latency_s=2.0, ttft_s=0.5, gaps_s=(0.1, 0.2, 0.3, 0.4))
    # Its tokens come at 1.5, 1.6, 1.8, 2.1 and 2.5.
    assert gaps_between(stream, 1.7, 2.0) == [0.2, 0.3]
    assert gaps_between(stream, 0.0, 9.0) == [0.1, 0.2, 0.3, 0.4]
    assert gaps_between(stream, 5.0, 9.0) == [0.1, 0.2, 0.3, 0.4]


def test_a_visit_is_written_without_every_gap() -> None:
    visit = Round([10.0] * 99 + [20.0] * 2, [10.0] * 50 + [60.0] * 50, 7.0)
    assert (visit.p99_alone, visit.p99_mixed) == (20.0, 60.0)
    assert visit.as_json()["median_mixed_ms"] == 35.0


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    file = tmp_path / "fairness.json"
    load = ["--streams", "4", "--output-len", "60", "--prompts", "3", "--limits", "64", "--rounds", "2"]
    assert main(["bench", "fairness", str(TINY), *load, "--json", str(file)]) == 0
    arms = json.loads(file.read_text())["arms"]
    assert [(arm["limit"], arm["dbo"]) for arm in arms] == [("off", False), ("64", False), ("off", True), ("64", True)]
    for arm in arms:
        assert len(arm["rounds"]) == 4
        assert arm["stretch"]["low"] <= arm["stretch"]["median"] <= arm["stretch"]["high"]
        assert (arm["overlapped"] > 0) == (arm["dbo"] and arm["limit"] == "off"), "64 tokens are below the threshold"
    assert arms[0]["throughput"]["median"] == arms[2]["throughput"]["median"] == 1.0
