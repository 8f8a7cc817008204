"""What tests of failing lanes share: lanes that go on for ever or raise, and whether a pool is usable afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
from lanes import EVERY_POINT, lane_pool, run, walker

from ubatch import Schedule, dbo_yield, interleave, tracing
from ubatch.lanes.workers import LanePool
from ubatch.streams.streams import StreamBackend


def usable(pool: LanePool) -> bool:
    """Whether the next steps run as if nothing had been, and be it slowly: a busy machine is no hang."""
    programs = [[f"{lane}{index}" for index in range(3 + lane)] for lane in range(pool.lanes)]
    usual, pool.timeout_s = pool.timeout_s, 20.0
    try:
        for _ in range(2):
            with tracing() as trace:
                results = run(pool, *[walker(program, lane) for lane, program in enumerate(programs)])
            if results != list(range(pool.lanes)) or trace.order != interleave(programs):
                return False
    finally:
        pool.timeout_s = usual
    return True


def endless() -> None:
    while True:
        dbo_yield("on")


def explode(points: int, error: BaseException) -> Callable[[], None]:
    """A lane that raises after so many points."""

    def exploding() -> None:
        for index in range(points):
            dbo_yield(f"p{index}")
        raise error

    return exploding


def fails(
    *bodies: Callable[[], Any],
    raises: type[BaseException] = ValueError,
    match: str = "original",
    streams: StreamBackend | None = None,
    schedule: Schedule = EVERY_POINT,
) -> BaseException:
    """Run a step that fails so; the next steps run as if nothing had been. Returns the error."""
    with lane_pool(len(bodies), streams=streams) as pool:
        with pytest.raises(raises, match=match) as caught:
            run(pool, *bodies, schedule=schedule)
        assert usable(pool)
    return caught.value


def one_of(lanes: int, which: int, body: Callable[[], Any]) -> list[Callable[[], Any]]:
    """Bodies of so many lanes that go on for ever, but for one."""
    return [body if lane == which % lanes else endless for lane in range(lanes)]
