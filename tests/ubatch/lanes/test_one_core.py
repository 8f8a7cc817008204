"""Parked lanes wait on one core; a lane that runs may use all of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from lanes import EVERY_POINT, run

from ubatch import dbo_yield
from ubatch.lanes.one_core import OneCore, one_core
from ubatch.lanes.workers import LanePool


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


@pytest.mark.parametrize("fails", [False, True])
def test_a_parked_lane_is_bound_and_a_running_one_is_free(fails: bool, all_cores: set[int]) -> None:
    threads: list[int] = []
    seen: list[tuple[set[int], list[set[int]]]] = []

    def body() -> None:
        threads.append(threading.get_native_id())
        for _ in range(4):
            dbo_yield()
            others = [thread for thread in threads if thread != threading.get_native_id()]
            seen.append((os.sched_getaffinity(0), [os.sched_getaffinity(thread) for thread in others]))
        if fails:
            raise ValueError("original")

    pool = LanePool(3, torch.device("cpu"), 20.0)
    pool._gathers = True  # as on a GPU
    try:
        for _ in range(2):
            threads.clear()
            if fails:
                with pytest.raises(ValueError, match="original"):
                    run(pool, body, body, body)
            else:
                run(pool, body, body, body, schedule=EVERY_POINT)
            assert all(running == all_cores for running, _ in seen)
            parked = [cores for _, others in seen for cores in others]
            assert len(parked) >= 6
            assert all(len(cores) == 1 for cores in parked[:6])
            assert all(os.sched_getaffinity(thread) == all_cores for thread in threads), "free between steps"
    finally:
        pool.close()


def test_on_a_cpu_lanes_are_left_where_they_are() -> None:
    pool = LanePool(2, torch.device("cpu"), 20.0)
    assert not pool._gathers
    pool.close()


def test_masks_of_many_cores() -> None:
    masks = OneCore(130, frozenset({0, 9, 130}))
    assert (masks._size, len(masks._free)) == (24, 24)
    assert masks._free == bytes([1, 2, *[0] * 14, 4, *[0] * 7])
    assert masks._parked == bytes([*[0] * 16, 4, *[0] * 7])


def test_with_one_core_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert one_core() is None
    monkeypatch.delattr(os, "sched_setaffinity")
    assert one_core() is None
