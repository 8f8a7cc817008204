"""Ranges for profilers: one per lane and point, from every lane's own thread; none unless requested."""

import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from lanes import EVERY_POINT, lane_pool, run
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from wrapping import wrapped

from ubatch import Schedule, dbo_yield, profile_ranges

POINTS = ("select", "dispatch", "mine")


class Layers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for point in POINTS:
            x = x.sin()
            dbo_yield(point)
        return x.cos()


def profiled(body: Callable[[], object]) -> list[Any]:
    """The ranges that lanes showed while `body` ran."""
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as profiler:
        body()
    return [event for event in profiler.events() if event.name.startswith("lane ")]


@pytest.mark.parametrize("lanes", [2, 3])
def test_every_lane_and_point_has_a_range(lanes: int) -> None:
    x = torch.randn(lanes * 2, 4)
    with wrapped(Layers(), num_ubatches=lanes, profile_ranges=True) as wrapper:
        wrapper(x)
        events = profiled(lambda: wrapper(x))
    expected = {f"lane {lane} | {point}": 1 for lane in range(lanes) for point in ("start", *POINTS)}
    assert Counter(event.name for event in events) == expected
    threads = {event.name.split(" |")[0]: event.thread for event in events}
    assert len(set(threads.values())) == lanes, "each lane's ranges come from its own thread"
    assert all(threads[event.name.split(" |")[0]] == event.thread for event in events)


def test_ranges_of_a_lane_follow_one_another_and_hold_what_it_ran() -> None:
    schedule = Schedule("test", points_off=frozenset({"select"}))

    def body() -> None:
        for point in POINTS:
            with record_function("lane's own"):
                torch.ones(3).sin()
            dbo_yield(point)

    with lane_pool() as pool, profile_ranges():
        events = profiled(lambda: run(pool, body, body, schedule=schedule))
    ranges = [event for event in events if "|" in event.name]
    for lane in (0, 1):
        own = sorted(
            (event.time_range.start, event.time_range.end) for event in ranges if event.name.startswith(f"lane {lane}")
        )
        assert len(own) == 1 + len(POINTS)
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
    children = {child.name for event in ranges for child in event.cpu_children}
    assert "lane's own" in children


def test_nobody_asked() -> None:
    x = torch.randn(4, 4)
    with wrapped(Layers()) as wrapper:
        wrapper(x)
        assert not profiled(lambda: wrapper(x))
        with profile_ranges(False):
            assert not profiled(lambda: wrapper(x))
        with profile_ranges():
            assert len(profiled(lambda: wrapper(x))) == 2 * (1 + len(POINTS))
        assert not profiled(lambda: wrapper(x))


class Nvtx:
    """NVTX without a GPU."""

    def __init__(self) -> None:
        self.open: dict[int, tuple[str, int]] = {}
        self.closed: list[str] = []

    def range_start(self, name: str) -> int:
        handle = len(self.open) + len(self.closed)
        self.open[handle] = name, threading.get_ident()
        return handle

    def range_end(self, handle: int) -> None:
        name, thread = self.open.pop(handle)
        assert thread == threading.get_ident()
        self.closed.append(name)


def test_nvtx_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = Nvtx()
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def fails() -> None:
        dbo_yield("dispatch")
        assert len(nvtx.open) == 1, "only the lane that holds the baton has an open range"
        raise ValueError("original")

    with lane_pool() as pool, profile_ranges(), pytest.raises(ValueError, match="original"):
        run(pool, fails, lambda: dbo_yield("dispatch"), schedule=EVERY_POINT)
    assert not nvtx.open, "a failure closes them too"
    assert nvtx.closed[:3] == ["lane 0 | start", "lane 1 | start", "lane 0 | dispatch"]
