"""What the API process keeps of the experts' load, the file that it writes, and when a balancer orders moves: without
engines, loads are put into the book by hand."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from repository import ROOT, TINY_MOE

from moe import ExpertPlacement
from moe.balance import EplbConfig, Ints, LoadKind, read_loads
from serving.balance import Balancer, LoadBook, balancer, check_load_out, load_book
from serving.engine_metrics import show_moves
from ubatch import ConfigError

EXPERTS = 8
SKEWED, TURNED = [40, 30, 20, 10, 1, 1, 1, 1], [1, 1, 1, 1, 40, 30, 20, 10]


def counts_of(loads: Sequence[int]) -> Ints:
    """Of two layers, in prefills only."""
    return np.array([[loads, loads], np.zeros((2, EXPERTS), dtype=int)])


class Bench:
    """A balancer over two ranks, and the orders that it has sent."""

    def __init__(self, **config: Any) -> None:
        settings = {"window_size": 20, "step_interval": 100, "balancedness_fall": 0.0, **config}
        self.book = LoadBook(ExpertPlacement.default(2, EXPERTS, 2), None, 20)
        self.orders: list[tuple[int, ExpertPlacement, list[int]]] = []
        self.balancer = Balancer(EplbConfig(**settings), self.book, self._send, expert_bytes=1000)

    def _send(self, number: int, placement: ExpertPlacement, layers: Sequence[int]) -> None:
        self.orders.append((number, placement, list(layers)))

    async def count(self, steps: int, loads: Sequence[int]) -> None:
        """So many steps of both ranks, two at a time."""
        counts = counts_of(loads)
        for _ in range(steps // 2):
            for rank in range(2):
                self.book.add(rank, 2, counts)
                self.balancer.counted(rank, 2)
            while self.balancer._planning is not None:
                await asyncio.sleep(0.001)

    def obey(self, failure: str = "") -> None:
        number, _, layers = self.orders[-1]
        if not failure:
            for layer in layers:
                self.balancer.moved(number, [layer], 10, "", over=layer == layers[-1])
        else:
            self.balancer.moved(number, [], 0, failure, over=True)


async def test_it_plans_at_the_interval_and_not_while_experts_move() -> None:
    bench = Bench()
    await bench.count(98, SKEWED)
    assert not bench.orders
    await bench.count(2, SKEWED)
    assert bench.balancer.rearrangements == {"interval": 1}
    assert bench.orders[0][1].balancedness(np.array([SKEWED] * 2)).min() > 0.9
    assert bench.balancer.moving
    await bench.count(300, TURNED)
    assert len(bench.orders) == 1
    bench.obey()
    assert not bench.balancer.moving
    assert bench.book.placement == bench.orders[0][1]
    assert (bench.balancer.layers_moved, bench.balancer.bytes_moved) == (2, 20)
    await bench.count(300, SKEWED)  # balanced: experts stay
    assert len(bench.orders) == 1


async def test_it_plans_early_when_balancedness_falls_but_once_in_a_window() -> None:
    bench = Bench(step_interval=100_000, balancedness_fall=0.1)
    await bench.count(20, [10] * EXPERTS)
    assert not bench.orders
    await bench.count(40, SKEWED)
    assert bench.balancer.rearrangements == {"fallen": 1}
    bench.obey()
    await bench.count(40, SKEWED)
    assert len(bench.orders) == 1
    swapped = np.array(SKEWED)
    held = bench.book.placement.held(0, 0)
    swapped[:] = 1
    swapped[held] = [40, 30, 20, 10]
    await bench.count(40, swapped.tolist())
    assert len(bench.orders) == 2


async def test_a_fall_is_planned_for_by_what_came_since() -> None:
    """After four tenths of a window; those before it would hide from the planner what changed."""
    bench = Bench(step_interval=100_000, balancedness_fall=0.1)
    await bench.count(20, [10] * EXPERTS)
    await bench.count(8, SKEWED)
    ((_, placement, layers),) = bench.orders
    assert layers == [0, 1]
    assert placement.balancedness(np.array([SKEWED] * 2)).min() > 0.9


async def test_a_plan_whose_time_comes_after_a_fall_waits_for_what_comes_since() -> None:
    """At once, it would be for loads of which most are past, and the next one may come only a window later."""
    bench = Bench(balancedness_fall=0.1)
    await bench.count(98, [10] * EXPERTS)
    await bench.count(8, SKEWED)
    assert bench.balancer.rearrangements == {"fallen": 1}
    assert bench.orders[0][1].balancedness(np.array([SKEWED] * 2)).min() > 0.9


async def test_a_short_fall_delays_a_plan_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    bench = Bench(balancedness_fall=0.1)
    await bench.count(98, [10] * EXPERTS)
    await bench.count(2, SKEWED)
    assert "experts stay" not in caplog.text
    await bench.count(2, [10] * EXPERTS)
    assert "experts stay" in caplog.text


async def test_failures_are_counted_and_the_placement_stays() -> None:
    bench = Bench()
    await bench.count(100, SKEWED)
    before = bench.book.placement
    bench.obey("checksum")
    assert bench.book.placement == before
    assert bench.balancer.failed == {"checksum": 1}
    await bench.count(100, SKEWED)
    bench.balancer.moved(bench.orders[-1][0], [0], 10, "", over=False)
    bench.balancer.interrupted()
    assert bench.balancer.failed == {"checksum": 1, "interrupted": 1}
    partly = bench.book.placement
    assert partly != before
    bench.balancer.restarted()
    assert bench.book.placement == before
    assert bench.orders[-1][1:] == (partly, [0])
    bench.balancer.interrupted()  # again, before it was restored
    bench.balancer.restarted()
    assert bench.orders[-1][1:] == (partly, [0])
    bench.balancer.moved(1, [0], 10, "", over=True)  # of an earlier run
    assert bench.balancer.moving
    bench.obey()
    assert bench.book.placement == partly


async def test_a_pause_is_no_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move is weighed by what steps take, not by how long ranks had nothing to do."""
    now, decide = [100.0], Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(balancer, "decide", decide)
    monkeypatch.setattr(balancer.time, "monotonic", lambda: now[0])
    bench = Bench()
    for steps, seconds in [(2, 0.04)] * 48 + [(1, 0.02), (1, 3600.0), (2, 3600.0)]:
        now[0] += seconds
        bench.book.add(0, steps, counts_of(SKEWED))
        bench.balancer.counted(0, steps)
    await asyncio.wait([bench.balancer._planning] if bench.balancer._planning else [])
    (planned,) = decide.call_args_list
    assert planned.args[2].step_s == pytest.approx(0.02)


async def test_a_plan_of_engines_that_have_failed_is_dropped() -> None:
    """It is ready while there are no engines: an order would go nowhere, and none would follow."""
    bench = Bench()
    await bench.count(98, SKEWED)
    bench.book.add(0, 2, counts_of(SKEWED))
    bench.balancer.counted(0, 2)
    planning = bench.balancer._planning
    bench.balancer.interrupted()
    await asyncio.wait([planning])
    bench.balancer.restarted()
    assert not bench.balancer.moving
    assert not bench.orders
    await bench.count(100, SKEWED)
    assert bench.balancer.moving


async def test_engines_that_fail_again_come_back_to_where_they_were() -> None:
    """They had nothing to come back to the first time; then layers were switched."""
    bench = Bench()
    bench.balancer.interrupted()
    bench.balancer.restarted()
    assert not bench.orders
    await bench.count(100, SKEWED)
    bench.balancer.moved(bench.orders[-1][0], [0], 10, "", over=False)
    partly = bench.book.placement
    bench.balancer.interrupted()
    bench.balancer.restarted()
    assert bench.orders[-1][1:] == (partly, [0])


async def test_an_error_of_the_planner_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(balancer, "decide", Mock(side_effect=ZeroDivisionError))
    bench = Bench()
    with caplog.at_level(logging.ERROR):
        await bench.count(100, SKEWED)
    assert bench.balancer.failed == {"unplanned": 1}
    assert "no placement could be planned" in caplog.text


async def test_metrics_and_log(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(log_balancedness=True, log_balancedness_interval=50)
    with caplog.at_level(logging.INFO):
        await bench.count(100, SKEWED)
    assert caplog.text.count("expert load") == 2
    registry = CollectorRegistry()
    show_moves(registry, "m", bench.balancer)
    value = registry.get_sample_value
    assert value("ubatch:eplb_rearrangements_total", {"model_name": "m", "reason": "interval"}) == 1
    assert value("ubatch:eplb_moving", {"model_name": "m"}) == 1
    bench.obey("timeout")
    assert value("ubatch:eplb_moves_failed_total", {"model_name": "m", "reason": "timeout"}) == 1
    assert value("ubatch:eplb_moving", {"model_name": "m"}) == 0
    assert value("ubatch:eplb_bytes_moved_total", {"model_name": "m"}) == 0


COUNTS = np.array([[[30, 0]], [[0, 10]]])


def test_balance_is_of_the_placement_and_the_kind() -> None:
    book = LoadBook(ExpertPlacement.default(1, 2, 2))
    assert book.balance().balancedness().tolist() == [1.0]
    book.add(0, 1, COUNTS)
    balance = book.balance()
    assert balance.rank_tokens().tolist() == [[30, 10]]
    assert balance.balancedness().tolist() == [pytest.approx(20 / 30)]
    assert balance.balancedness("decode").tolist() == [0.5]
    assert balance.tokens(LoadKind.PREFILL).tolist() == [[30, 0]]
    with pytest.raises(ConfigError, match="unknown kind of steps 'prefil'; did you mean 'prefill'"):
        balance.tokens("prefil")
    book.placement = ExpertPlacement(np.array([[0, 1, 0, 1]]), 2, 2)
    assert book.balance().balancedness().tolist() == [1.0]
    assert LoadBook(ExpertPlacement.default(1, 2, 1)).balance().rank_tokens().shape == (1, 1)


async def test_the_file_is_written_now_and_then_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_book, "EVERY_S", 0.02)
    path = tmp_path / "loads.json"
    book = LoadBook(ExpertPlacement.default(1, 2, 2), path)

    found = []
    task = asyncio.create_task(book.keep())
    for _ in range(2):
        book.add(0, 1, COUNTS)
        await asyncio.sleep(0.3)
        found.append(read_loads(path).sum())
    at = path.stat().st_mtime_ns
    await asyncio.sleep(0.1)
    assert path.stat().st_mtime_ns == at, "nothing has come, so nothing is written"
    monkeypatch.setattr(load_book, "EVERY_S", 100.0)
    await asyncio.sleep(0.1)
    book.add(0, 1, COUNTS)
    book.end()
    await task
    assert [*found, read_loads(path).sum()] == [40, 80, 120]


def test_an_engine_without_a_loop_writes_as_it_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loads.npy"
    book = LoadBook(ExpertPlacement.default(1, 2, 2), path)
    book.add(0, 1, COUNTS)
    book.tick()
    assert not path.exists()
    monkeypatch.setattr(load_book, "EVERY_S", 0.0)
    book.tick()
    assert read_loads(path).sum() == 40


def test_a_file_that_cannot_be_written_is_told_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = LoadBook(ExpertPlacement.default(1, 2, 2), tmp_path / "gone" / "loads.npy")
    book.add(0, 1, COUNTS)
    with caplog.at_level(logging.ERROR):
        book.write()
    assert "the experts' load cannot be written" in caplog.text


def test_files_that_cannot_be_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_load_out(tmp_path / "loads.npy")
    for path, why in (
        (tmp_path / "loads.csv", r"ends with \.npy or \.json"),
        (tmp_path / "none" / "loads.npy", "there is no folder"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_load_out(path)
    (tmp_path / "loads.json").mkdir()
    with pytest.raises(ConfigError, match="it is a folder"):
        check_load_out(tmp_path / "loads.json")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="cannot be written to"):
        check_load_out(tmp_path / "loads.npy")


SCRIPT = """
import os, signal, sys
from serving import LLM, SamplingParams
from serving.balance import load_book

load_book.EVERY_S = 0.0
llm = LLM(sys.argv[1], expert_load_out=sys.argv[2])
llm.generate("def main(", SamplingParams(temperature=0, max_tokens=110, ignore_eos=True), use_tqdm=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.wide
def test_a_process_that_is_killed_leaves_its_last_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "loads.npy"
    words = [sys.executable, "-c", SCRIPT, str(TINY_MOE), str(path)]
    ended = subprocess.run(words, cwd=ROOT, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    loads = read_loads(path)
    assert loads.shape[1:] == (4, 8)
    assert loads[:, 0].sum() > 2 * 100, "of the first hundred steps"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
