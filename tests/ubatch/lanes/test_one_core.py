"""On a GPU lanes share a core, once their steps leave no new threads; whatever they start is free again."""

import errno
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
from lanes import EVERY_POINT, lane_pool, run

from ubatch import ForwardContext, ForwardMode, Schedule, UBatchTimeout, dbo_yield, get_schedule
from ubatch.lanes.one_core import QUIET_STEPS, OneCore, one_core
from ubatch.lanes.workers import LanePool
from ubatch.ranks.long_calls import taking_long


@pytest.fixture
def all_cores() -> Iterator[set[int]]:
    """Those of the machine, also where tests have a core each."""
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("threads have no masks here")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        cores = os.sched_getaffinity(0)
        if len(cores) < 2:
            pytest.skip("this machine has one core")
        yield cores
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture
def pool(all_cores: set[int]) -> Iterator[LanePool]:
    """Three lanes, which share a core as on a GPU, as their first steps have started no thread but their own."""
    with lane_pool(3) as pool:
        assert not pool._on_one_core, "on a CPU lanes are left where they are"
        pool._on_one_core = True
        assert_free_for(QUIET_STEPS + 1, pool, all_cores)
        yield pool


@pytest.fixture
def started() -> Iterator[threading.Thread]:
    """A thread for a lane to start; it ends with the test."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, args=(20,))
    yield thread
    ended.set()
    thread.join()


def cores_in_lanes(
    pool: LanePool, schedule: Schedule = EVERY_POINT, context: ForwardContext | None = None
) -> list[set[int]]:
    seen: list[set[int]] = []
    pool.run([lambda: seen.append(os.sched_getaffinity(0))] * 3, schedule.with_lanes(3), [context] * 3)
    assert len(seen) == 3
    return seen


def assert_free_for(steps: int, pool: LanePool, all_cores: set[int]) -> None:
    """The lanes are free in so many steps, and share a core in the next one."""
    for step in range(steps):
        assert cores_in_lanes(pool) == [all_cores] * 3, step
    assert [len(cores) for cores in cores_in_lanes(pool)] == [1, 1, 1]


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_lanes_share_a_core_from_the_beginning_of_a_step_to_its_end(
    fails: bool, patient: bool, pool: LanePool, all_cores: set[int]
) -> None:
    threads: list[int] = []
    seen: list[set[int]] = []

    def body() -> None:
        threads.append(threading.get_native_id())
        for _ in range(4):
            dbo_yield()
            seen.append(os.sched_getaffinity(0))
        if fails:
            raise ValueError("original")

    for _ in range(2):
        seen.clear()
        with pytest.raises(ValueError, match="original") if fails else nullcontext():
            run(pool, body, body, body, patient=patient)
        assert all(cores == seen[0] for cores in seen)
        assert patient == (seen[0] == all_cores)
        assert patient or len(seen[0]) == 1
        assert all(os.sched_getaffinity(thread) == all_cores for thread in threads), "free between steps"


def test_steps_of_another_kind_are_free_at_first(pool: LanePool, all_cores: set[int]) -> None:
    assert cores_in_lanes(pool, get_schedule("mlp_shared_overlap")) == [all_cores] * 3
    assert cores_in_lanes(pool, context=ForwardContext(mode=ForwardMode.DECODE)) == [all_cores] * 3
    assert [len(cores) for cores in cores_in_lanes(pool)] == [1, 1, 1]


def test_a_thread_that_a_lane_starts_is_freed_and_the_next_steps_are_free(
    pool: LanePool, all_cores: set[int], started: threading.Thread
) -> None:
    seen: list[set[int]] = []

    def starts() -> None:
        started.start()
        assert started.native_id is not None
        seen.append(os.sched_getaffinity(started.native_id))

    run(pool, starts, lambda: None, lambda: None)
    assert len(seen[0]) == 1, "it inherits the core"
    assert os.sched_getaffinity(started.native_id or 0) == all_cores
    assert_free_for(QUIET_STEPS, pool, all_cores)


def test_a_lane_is_free_from_a_call_on_that_takes_long_and_where_it_forks(pool: LanePool, all_cores: set[int]) -> None:
    seen: list[set[int]] = []

    def body() -> None:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # there are other threads
            child = os.fork()
        if child == 0:
            os._exit(os.sched_getaffinity(0) != all_cores)
        assert os.waitpid(child, 0)[1] == 0
        seen.append(os.sched_getaffinity(0))
        with taking_long("compiling"):
            seen.append(os.sched_getaffinity(0))
        dbo_yield()
        seen.append(os.sched_getaffinity(0))

    run(pool, body, dbo_yield, dbo_yield)
    assert [len(cores) for cores in seen] == [1, len(all_cores), len(all_cores)]
    assert [len(cores) for cores in cores_in_lanes(pool)] == [1, 1, 1]


@pytest.mark.long
def test_a_lane_that_hangs_is_freed_and_new_lanes_are_free_at_first(pool: LanePool, all_cores: set[int]) -> None:
    ended = threading.Event()
    threads: list[int] = []

    def hangs() -> None:
        threads.append(threading.get_native_id())
        assert len(os.sched_getaffinity(0)) == 1
        ended.wait(20)

    pool.timeout_s = 1.0
    try:
        with pytest.raises(UBatchTimeout):
            run(pool, hangs, lambda: None, lambda: None)
        assert os.sched_getaffinity(threads[0]) == all_cores
        pool.timeout_s = 20.0
        assert_free_for(QUIET_STEPS + 1, pool, all_cores)
    finally:
        ended.set()


def test_threads_that_could_not_be_listed_are_freed_before_the_next_step(
    pool: LanePool, all_cores: set[int], started: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more_files(_: str) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("ubatch.lanes.one_core.os.listdir", no_more_files)
        run(pool, started.start, lambda: None, lambda: None)
        assert len(os.sched_getaffinity(started.native_id or 0)) == 1
        assert cores_in_lanes(pool) == [all_cores] * 3
    assert_free_for(QUIET_STEPS, pool, all_cores)
    assert os.sched_getaffinity(started.native_id or 0) == all_cores


def test_a_core_that_was_taken_away_ends_no_step(all_cores: set[int]) -> None:
    OneCore(frozenset({4095}), frozenset(all_cores)).bind()
    assert os.sched_getaffinity(0) == all_cores


def test_after_ctrl_c_the_next_step_frees_what_the_last_one_left(
    pool: LanePool, all_cores: set[int], started: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(core: OneCore, thread: int = 0) -> None:
        if thread:
            raise KeyboardInterrupt
        free(core)

    free = OneCore.free
    with monkeypatch.context() as patch:
        patch.setattr(OneCore, "free", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            run(pool, started.start, lambda: None, lambda: None)
    assert len(os.sched_getaffinity(started.native_id or 0)) == 1
    assert_free_for(QUIET_STEPS, pool, all_cores)
    assert os.sched_getaffinity(started.native_id or 0) == all_cores


def test_with_one_core_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ubatch.lanes.one_core._libc", lambda: Mock(sched_getcpu=lambda: 3))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4})
    assert one_core() == OneCore(frozenset({3}), frozenset({3, 4}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert one_core() is None
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "sched_setaffinity")
    assert one_core() is None
