"""What tests of lanes share: pools that are closed again, lanes that walk a list of points, works that are not real."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ubatch import CommGroup, ForwardContext, Gate, Schedule, Trace, dbo_yield, make_ubatch_contexts, tracing
from ubatch.lanes.workers import LanePool, SingleLane
from ubatch.streams.streams import StreamBackend

EVERY_POINT = Schedule("every_point", points_off=frozenset())
CPU = torch.device("cpu")


@contextmanager
def lane_pool(lanes: int = 2, timeout_s: float = 20.0, streams: StreamBackend | None = None) -> Iterator[LanePool]:
    """A pool whose threads are stopped at the end."""
    pool = LanePool(lanes, CPU, timeout_s, streams)
    try:
        yield pool
    finally:
        pool.close()


def run(
    pool: LanePool, *bodies: Callable[[], Any], schedule: Schedule = EVERY_POINT, patient: bool = False
) -> list[Any]:
    """One step without forward contexts."""
    return pool.run(bodies, schedule.with_lanes(len(bodies)), [None] * len(bodies), patient=patient)


def walker(program: Sequence[str], result: Any = None) -> Callable[[], Any]:
    """A lane that passes these points and returns `result`."""

    def body() -> Any:
        for point in program:
            dbo_yield(point)
        return result

    return body


def lane_threads() -> list[str]:
    """Names of the living worker threads of all pools."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ubatch-lane"))


def no_lane_threads_within(seconds: float) -> bool:
    """Whether all worker threads end within `seconds`."""
    return within(seconds, lambda: not lane_threads())


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether `condition` comes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def open_files() -> int:
    """File descriptors of this process, after what is garbage has gone."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


class FakeWork:
    """A transport's work that ends when the test says so.

    Args:
        error: what its end is.
        regards_timeout: whether a wait ends with the time-out that it is given.
    """

    def __init__(self, error: BaseException | None = None, *, regards_timeout: bool = False) -> None:
        self.error, self.regards_timeout = error, regards_timeout
        self._over = threading.Event()

    def finish(self) -> None:
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.error is not None:
            self._over.set()
            raise self.error
        if not self._over.wait(timeout.total_seconds() if timeout is not None and self.regards_timeout else 30):
            raise RuntimeError("nobody finished this fake work in time")
        return True


class FinishedWork(FakeWork):
    """A work that is over from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.finish()


class OwnThreads:
    """Own threads around `with context`, the way a serving engine drives lanes itself; contexts are kept."""

    def __init__(self, lanes: int) -> None:
        self.ready = Gate(lanes)
        contexts = [ForwardContext(num_tokens=lane) for lane in range(lanes)]
        self.contexts = make_ubatch_contexts(lanes, None, None, contexts, self.ready, schedule=EVERY_POINT)
        self.errors: list[tuple[int, BaseException]] = []

    def run(self, *bodies: Callable[[], object]) -> None:
        def lane(index: int) -> None:
            try:
                with self.contexts[index]:
                    bodies[index]()
            except BaseException as error:
                self.errors.append((index, error))

        self.contexts[0].baton.prepare(0)
        self.ready.close_again()
        threads = [threading.Thread(target=lane, args=(index,)) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        assert self.ready.wait_for(20)
        self.contexts[0].baton.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def alone(group: CommGroup | None, schedule: Schedule, body: Callable[[], Tensor]) -> tuple[Tensor, Trace]:
    """Run `body` as the only lane of a schedule: single-batch overlap without a model around it."""
    with closing(SingleLane(torch.device("cpu"))) as lane, tracing() as trace:
        trace.step = 1
        (output,) = lane.run([body], schedule, [None], frozenset(() if group is None else group.ranks))
    return output, trace
