"""The next step works after any failure: a thousand runs with random failures, and every failure of the wrapper."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from failure_cases import endless, usable
from lanes import FakeWork, lane_threads, no_lane_threads_within, open_files, run
from wrapping import Plain, rows, wrapped

from ubatch.dbo import dbo_current_ubatch_id, dbo_register_recv_hook, dbo_yield
from ubatch.errors import UBatchTimeout
from ubatch.lanes.workers import LanePool
from ubatch.ranks.transfer import Transfer
from ubatch.schedules.ring import interleave
from ubatch.schedules.schedule import Schedule

pytestmark = [pytest.mark.timeout(60), pytest.mark.long]


# -------------------------------------------------------------------------------------------------- a thousand failures


def test_a_thousand_runs_that_fail_anywhere() -> None:
    dice = random.Random(20)
    swallowed = 0

    class Planned(Exception):
        pass

    def lane(index: int, points: int, fails_at: int | None, swallows: bool) -> Callable[[], int]:
        def body() -> int:
            nonlocal swallowed
            for point in range(points + 1):
                if point == fails_at:
                    raise Planned(index)
                if point == points:
                    break
                try:
                    dbo_yield(f"p{point}")
                except BaseException:
                    if not swallows:
                        raise
                    swallowed += 1
            return index

        return body

    pools = {lanes: LanePool(lanes, torch.device("cpu"), 20.0) for lanes in (2, 3, 4)}
    for pool in pools.values():
        assert usable(pool)
    files, threads = open_files(), threading.active_count()
    failed = 0
    for _ in range(1000):
        lanes = dice.choice([2, 3, 4])
        lengths = [dice.randrange(6) for _ in range(lanes)]
        fails = [dice.randrange(length + 1) if dice.random() < 0.5 else None for length in lengths]
        lead = dice.choice([0, 0, 1, 2])
        bodies = [lane(index, lengths[index], fails[index], dice.random() < 0.3) for index in range(lanes)]
        # The computed order says which lane meets its failure first.
        order = interleave([[str(point) for point in range(length)] for length in lengths], lead=lead)
        stages = [(index, lengths[index] if name == "end" else int(name)) for index, name in order]
        first = next((index for index, stage in stages if fails[index] == stage), None)
        schedule = Schedule("random", lead=lead, points_off=frozenset())
        if first is None:
            assert run(pools[lanes], *bodies, schedule=schedule) == list(range(lanes))
        else:
            failed += 1
            with pytest.raises(Planned) as caught:
                run(pools[lanes], *bodies, schedule=schedule)
            assert caught.value.args == (first,)
    assert failed > 600
    assert swallowed > 100
    assert threading.active_count() <= threads
    assert open_files() <= files
    for pool in pools.values():
        assert usable(pool)
        assert pool.counts.threads_started == pool.lanes
        pool.close()
    assert not lane_threads()


# ------------------------------------------------------------------------------------------ the wrapper, after failures


def _raise(error: BaseException) -> None:
    raise error


def _hook_fails() -> None:
    dbo_register_recv_hook(lambda: _raise(ValueError("hook")))


TROUBLE: dict[str, tuple[Callable[[], object], type[BaseException]]] = {
    "error": (lambda: _raise(ValueError("model")), ValueError),
    "abort": (lambda: _raise(KeyboardInterrupt()), KeyboardInterrupt),
    "hook": (_hook_fails, ValueError),
    "wait": (lambda: Transfer("t", [FakeWork(OSError("link"))], int).wait(), OSError),
    "hang": (lambda: time.sleep(0.7), UBatchTimeout),
    "ctrl-c": (lambda: (os.kill(os.getpid(), signal.SIGINT), endless()), KeyboardInterrupt),
    "exit": (lambda: _raise(SystemExit(3)), SystemExit),
}


@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("trouble", TROUBLE)
def test_the_wrapper_can_be_used_again(trouble: str, lane: int) -> None:
    act, error = TROUBLE[trouble]
    troubled = [False]

    def forward(x: torch.Tensor) -> torch.Tensor:
        if troubled[0] and dbo_current_ubatch_id() == lane:
            act()
        dbo_yield()
        return x * 2

    with wrapped(Plain(forward), timeout_s=0.25 if trouble == "hang" else 20.0) as wrapper:
        for _ in range(2):
            for fails in (False, True, False):
                troubled[0] = fails
                with pytest.raises(error) if fails else wrapper.no_timeout():
                    assert wrapper(rows(6)).equal(rows(6) * 2)
        statistics = wrapper.statistics()
        assert (statistics.calls, statistics.engaged, statistics.declined) == (6, 4, {})
    assert no_lane_threads_within(5)
