"""What tests of failing lanes share: lanes that go on for ever or raise, and whether a pool is usable afterwards."""

from __future__ import annotations

from collections.abc import Callable

from lanes import run, walker

from ubatch.dbo import dbo_yield
from ubatch.lanes.workers import LanePool
from ubatch.schedules.ring import interleave
from ubatch.trace.spans import tracing


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
