"""The lanes' threads: kept from step to step, stopped when unused, safe across fork and exit; and none to be had."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from children import exit_code, in_child
from failure_cases import usable
from lanes import CPU, OwnThreads, lane_pool, lane_threads, no_lane_threads_within, open_files, run, walker, within
from repository import ROOT

from ubatch import ForkedLaneError, Gate, UBatchError, dbo_current_ubatch_id, dbo_yield, interleave, tracing
from ubatch.lanes.workers import LanePool
from ubatch.streams.streams import NullStreams

pytestmark = pytest.mark.long

forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


# -------------------------------------------------------------------------------------------------- from step to step


def test_workers_persist() -> None:
    def body() -> tuple[int, int]:
        dbo_yield()
        return threading.get_ident(), dbo_current_ubatch_id()

    with lane_pool(3) as pool:
        first = run(pool, body, body, body)
        assert len(set(first)) == 3
        threads, files = threading.active_count(), open_files()
        for _ in range(50):
            assert run(pool, body, body, body) == first
        assert threading.active_count() <= threads
        assert open_files() <= files
        assert (pool.counts.steps, pool.counts.threads_started) == (51, 3)
        assert threading.get_ident() not in [ident for ident, _ in first]


def test_close_stops_the_threads_and_the_next_step_makes_new_ones() -> None:
    pool = LanePool(2, CPU, 20.0)
    pool.close()
    for _ in range(2):
        assert not lane_threads(), "none before the first step"
        assert run(pool, walker("a", 1), walker("a", 2)) == [1, 2]
        workers = [thread for thread in threading.enumerate() if thread.name in lane_threads()]
        assert [worker.daemon for worker in workers] == [True] * 2
        pool.close()
        pool.close()
    assert pool.counts.threads_started == 4
    assert not lane_threads()


def test_a_dropped_pool_closes_itself() -> None:
    files = open_files()
    pool = LanePool(2, CPU, 20.0)
    run(pool, walker("a"), walker("a"))
    del pool
    assert no_lane_threads_within(5)
    assert open_files() <= files


def test_a_step_leaves_no_tensors_behind() -> None:
    refs: list[weakref.ref[torch.Tensor]] = []

    def body() -> torch.Tensor:
        made = torch.ones(4)
        refs.append(weakref.ref(made))
        dbo_yield()
        return made

    with lane_pool() as pool:
        results = run(pool, body, body)
        del results
        assert within(5, lambda: all(ref() is None for ref in refs))


def test_a_lane_lets_go_of_its_step_before_the_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what the caller drops next may live on until the lane's thread happens to run again."""
    arrive = Gate.arrive

    def arrive_and_stay(gate: Gate) -> None:
        arrive(gate)
        time.sleep(0.2)

    def body(kept: torch.Tensor) -> None:
        dbo_yield()

    with lane_pool() as pool:
        monkeypatch.setattr(Gate, "arrive", arrive_and_stay)
        tensors = [torch.ones(8), torch.ones(8)]
        refs = [weakref.ref(tensor) for tensor in tensors]
        run(pool, partial(body, tensors.pop()), partial(body, tensors.pop()))
        assert [ref() for ref in refs] == [None, None]


def test_lanes_start_only_when_all_are_warm() -> None:
    """Graph capture begins between the ready barrier and lane 0's start, so no lane may still be warming up then."""
    log: list[str] = []

    class SlowToWarm(NullStreams):
        def warm_up(self) -> None:
            time.sleep(0.05)
            log.append("warm")

    with lane_pool(3, streams=SlowToWarm()) as pool:
        run(pool, *[lambda: log.append("runs")] * 3)
    assert log == ["warm"] * 3 + ["runs"] * 3


def test_a_lane_that_cannot_start_fails_the_step_and_the_next_one_runs() -> None:
    broken_ones: set[str] = set()

    class BrokenOnce(NullStreams):
        def warm_up(self) -> None:
            name = threading.current_thread().name
            if name in broken_ones:
                broken_ones.discard(name)
                raise RuntimeError(f"no device for {name}")

    ran: list[int] = []
    with lane_pool(3, streams=BrokenOnce()) as pool:
        for broken in (["ubatch-lane-0"], ["ubatch-lane-2"], ["ubatch-lane-0", "ubatch-lane-1", "ubatch-lane-2"]):
            broken_ones.update(broken)
            with pytest.raises(RuntimeError, match=f"no device for {broken[0]}|no device for {broken[-1]}"):
                run(pool, *[lambda: ran.append(1)] * 3)
            assert not ran
            assert usable(pool)
    assert no_lane_threads_within(5)


def test_a_pool_cannot_run_inside_its_own_lane() -> None:
    with lane_pool() as pool, lane_pool() as other:
        with pytest.raises(UBatchError, match="was entered from inside lane 0"):
            run(pool, lambda: run(other, walker("a"), walker("a")), walker("a"))
        assert run(pool, walker("a", 1), walker("a", 2)) == [1, 2]


# ---------------------------------------------------------------------------------------------------------------- fork


@forks
def test_a_forked_child_has_lanes_of_its_own() -> None:
    with lane_pool() as pool:
        assert usable(pool)

        def child() -> None:
            for _ in range(3):
                assert usable(pool)
            pool.close()
            assert not lane_threads()

        children = [in_child(child) for _ in range(2)]
        for _ in range(20):
            assert usable(pool)
        assert [exit_code(each) for each in children] == [0, 0]
        assert usable(pool)
        assert pool.counts.threads_started == 2


@forks
def test_a_fork_inside_a_lane_gives_the_child_an_error_and_the_parent_its_result() -> None:
    children: list[int] = []

    def point() -> None:
        with pytest.raises(ForkedLaneError, match="lane 0 was forked"):
            dbo_yield()
        with pytest.raises(ForkedLaneError):
            dbo_yield()

    def forking() -> str:
        dbo_yield("a")
        children.append(in_child(point))
        dbo_yield("b")
        return "parent"

    with lane_pool() as pool:
        for _ in range(3):
            with tracing() as trace:
                assert run(pool, forking, walker("ab", "other")) == ["parent", "other"]
            assert trace.order == interleave(["ab", "ab"])
        assert [exit_code(child) for child in children] == [0, 0, 0]


@forks
@pytest.mark.parametrize("how", ["returns", "passes a point"])
@pytest.mark.parametrize("forking_lane", [0, 1])
def test_a_forked_lane_that_runs_on_ends_its_process_and_leaves_the_parent_alone(
    how: str, forking_lane: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The child shares the parent's descriptors; it must not open the parent's gate or take its wake-ups."""
    children: list[int] = []

    def forking() -> str:
        dbo_yield("a")
        dbo_yield("b")
        dbo_yield("c")  # by now the other lane may have ended, so the child would be the last to arrive
        child = os.fork()
        if child == 0:
            if how == "returns":
                return "child"
            dbo_yield("d")
        children.append(child)
        assert exit_code(child) == 1
        return "parent"

    with lane_pool() as pool:
        bodies = [walker("a", "other"), walker("a", "other")]
        bodies[forking_lane] = forking
        expected = ["other", "other"]
        expected[forking_lane] = "parent"
        for _ in range(3):
            assert run(pool, *bodies) == expected
        assert run(pool, walker("abc", 1), walker("abc", 2)) == [1, 2]
    assert len(children) == 3
    assert capfd.readouterr().err.count("ForkedLaneError: lane") == 3


@forks
def test_contexts_that_were_idle_at_a_fork_work_on_both_sides() -> None:
    """Parent and child must not wake each other's lanes through a descriptor that they share."""
    lanes = OwnThreads(2)
    lanes.run(walker("a"), walker("a"))
    log: list[int] = []

    def note() -> None:
        for _ in range(100):
            log.append(dbo_current_ubatch_id())
            dbo_yield()

    def steps() -> None:
        for _ in range(5):
            log.clear()
            lanes.run(note, note)
            assert (log, lanes.errors) == ([0, 1] * 100, [])

    children = [in_child(steps) for _ in range(2)]
    steps()
    assert [exit_code(child) for child in children] == [0, 0]


# ---------------------------------------------------------------------------------------------------------------- exit

PRELUDE = """
import gc, sys, time, torch
from ubatch import UBatchConfig, UBatchTimeout, UBatchWrapper, dbo_yield
class Model(torch.nn.Module):
    def __init__(self, seconds=0.0):
        super().__init__()
        self.seconds = seconds
    def forward(self, x):
        dbo_yield()
        time.sleep(self.seconds)
        return x + 1
def used():
    model = UBatchWrapper(Model(), UBatchConfig(verify="off", dbo_prefill_token_threshold=2, timeout_s=0.3))
    with model.no_timeout():
        assert model(torch.zeros(4)).tolist() == [1.0] * 4
    assert model.statistics().engaged == 1
    return model
"""
WAYS_TO_EXIT = {
    "with every kind of leftover": """
open, closed, dropped, collected, cyclic = [used() for _ in range(5)]
closed.close()
del dropped, collected
gc.collect()
cyclic.me = cyclic
del cyclic
""",
    "after a hang": """
hanging = used()
hanging.seconds = 60
try:
    hanging(torch.zeros(4))
except UBatchTimeout:
    pass
else:
    raise SystemExit("it did not hang")
""",
}


@pytest.mark.wide
@pytest.mark.sample(3)
@pytest.mark.parametrize("ways", [tuple(WAYS_TO_EXIT), *((way,) for way in WAYS_TO_EXIT)], ids=" and ".join)
def test_a_process_exits_promptly_however_it_leaves_its_lanes(ways: tuple[str, ...]) -> None:
    start = time.monotonic()
    code = PRELUDE + "".join(WAYS_TO_EXIT[way] for way in ways) + "sys.exit(0)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert time.monotonic() - start < 45


def test_garbage_collection_inside_a_lane_may_close_another_pool() -> None:
    """The finalizer of a dropped pool runs wherever the collector happens to; here in a lane."""
    other = LanePool(2, CPU, 20.0)
    run(other, walker("a"), walker("a"))
    held = [other]
    held.append(held)  # type: ignore[arg-type]
    del other, held

    def body() -> None:
        gc.collect()
        dbo_yield()

    with lane_pool() as pool:
        run(pool, body, body)
        assert within(5, lambda: len(lane_threads()) == 2)


# --------------------------------------------------------------------------------------- threads that cannot be started


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads that the system refuses to start."""
    names: set[str] = set()
    start = threading.Thread.start

    def refusing(thread: threading.Thread, *args: Any) -> None:
        if thread.name in names:
            raise RuntimeError("can't start new thread")
        start(thread, *args)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    return names


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_a_step_whose_threads_cannot_be_started(lane: int, refused: set[str]) -> None:
    with lane_pool(3) as pool:
        for _ in range(2):
            refused.add(f"ubatch-lane-{lane}")
            with pytest.raises(UBatchError, match=f"'ubatch-lane-{lane}' could not be started: can't start") as caught:
                run(pool, *[walker("ab")] * 3)
            assert type(caught.value.__cause__) is RuntimeError
            assert no_lane_threads_within(5)
        refused.clear()
        assert run(pool, *[walker("ab", 1)] * 3) == [1, 1, 1]
        assert len(lane_threads()) == 3
