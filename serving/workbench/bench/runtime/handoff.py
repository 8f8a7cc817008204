"""`ubatch bench handoff`: the time of one hand-off between lanes.

Arms, interleaved in one run: the runtime's own hand-off (a full `dbo_yield` in real lanes), and bare rings of two
threads over each wake-up primitive. Three settings: pinned to one core, not pinned, and not pinned next to another
Python thread that keeps the interpreter lock busy. Outside lanes, a `dbo_yield` is compared with an empty function.
"""

import os
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from functools import partial

import torch
from pydantic import Field

from serving.workbench.bench.options import BlockOptions
from serving.workbench.bench.statistics import (
    Interval,
    bootstrap,
    interleave_arms,
    on_cores,
    paired,
    split_cores,
    table,
)
from ubatch import dbo_yield, get_schedule
from ubatch.lanes.wakeup import EventFdWakeUp, LockWakeUp
from ubatch.lanes.workers import LanePool


class Options(BlockOptions):
    """What to measure."""

    measures = ("ubatch/lanes", "ubatch/schedules", "ubatch/streams")

    handoffs: int = Field(4000, ge=10, description="hand-offs per measurement; fewer next to a busy thread")


class _EventWakeUp:
    """The textbook hand-off with `threading.Event`, for comparison."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self) -> None:
        self._event.wait()
        self._event.clear()


def run(options: Options) -> int:
    noop = _call_ns(options.blocks)
    print(f"outside a lane: dbo_yield {noop['dbo_yield']:.0f} ns, an empty Python function {noop['empty']:.0f} ns")
    settings: dict[str, dict[str, list[float]]] = {}
    for name, around, handoffs in (
        ("pinned", partial(on_cores, split_cores()[0]), options.handoffs),
        ("unpinned", nullcontext, options.handoffs),
        ("busy", _busy_thread, max(10, options.handoffs // 10)),
    ):
        with around():
            settings[name] = _measure(handoffs, options.blocks, name)
    pinned = settings["pinned"]
    switches = {name: {arm: bootstrap(values) for arm, values in arms.items()} for name, arms in settings.items()}
    ratios = {name: paired(arms["dbo_yield"], arms["event"]) for name, arms in settings.items()}
    head = {"us per switch": "", **dict.fromkeys((*pinned, "dbo_yield / Event"), ".2f")}
    rows = [(name, *arms.values(), ratios[name]) for name, arms in switches.items()]
    print(f"\n{table(head, rows, indent=0)}")
    figures = {"noop_ns": noop["dbo_yield"], "empty_function_ns": noop["empty"], "ratio_to_event": ratios["pinned"]}
    figures |= {"per_switch_us": switches["pinned"]["dbo_yield"], "event_ring_us": switches["pinned"]["event"]}
    options.write(figures | {"settings": switches, "arms_us": settings})
    return 0


def _call_ns(blocks: int) -> dict[str, Interval]:
    """Nanoseconds of a `dbo_yield` outside a lane, and of what any Python function with its signature costs."""

    def empty(point: str = "user", layer: str = "") -> None:
        pass

    number = 200_000
    loop = timeit.Timer("pass")

    def ns(call: Callable[[str], None]) -> float:
        timer = timeit.Timer("call('dispatch')", globals={"call": call})
        return (timer.timeit(number) - loop.timeit(number)) / number * 1e9

    times = interleave_arms({"dbo_yield": partial(ns, dbo_yield), "empty": partial(ns, empty)}, blocks, label="calls")
    return {name: bootstrap(values) for name, values in times.items()}


def _measure(handoffs: int, blocks: int, label: str) -> dict[str, list[float]]:
    with closing(LanePool(2, torch.device("cpu"), timeout_s=60.0)) as pool:
        arms: dict[str, Callable[[], float]] = {"dbo_yield": lambda: _lanes_us(pool, handoffs)}
        if hasattr(os, "eventfd"):
            arms["eventfd"] = lambda: _ring_us(EventFdWakeUp, handoffs)
        arms["lock"] = lambda: _ring_us(LockWakeUp, handoffs)
        arms["event"] = lambda: _ring_us(_EventWakeUp, handoffs)
        return interleave_arms(arms, blocks, label=label)


def _lanes_us(pool: LanePool, handoffs: int) -> float:
    """Microseconds per hand-off, timed inside a lane from its first hand-off to its last, as in `_ring_us`."""
    times: list[float] = []

    def lane() -> None:
        start = time.perf_counter()
        for _ in range(handoffs // 2):
            dbo_yield()
        times.append(time.perf_counter() - start)

    pool.run([lane, lane], get_schedule("mlp_shared_overlap"), [None, None])
    return times[0] / handoffs * 1e6


def _ring_us(kind: Callable[[], EventFdWakeUp | LockWakeUp | _EventWakeUp], handoffs: int) -> float:
    wakes = [kind(), kind()]
    times: list[float] = []

    def lane(own: int) -> None:
        wakes[own].wait()
        start = time.perf_counter()
        for _ in range(handoffs // 2):
            wakes[1 - own].set()
            wakes[own].wait()
        times.append(time.perf_counter() - start)
        wakes[1 - own].set()

    with ThreadPoolExecutor(2) as pool:
        lanes = pool.map(lane, range(2))
        wakes[0].set()
        list(lanes)  # raises what a lane raised
    return times[0] / handoffs * 1e6


@contextmanager
def _busy_thread() -> Iterator[None]:
    stop = threading.Event()

    def spin() -> None:
        count = 0
        while not stop.is_set():
            count += 1

    with ThreadPoolExecutor(1) as pool:
        pool.submit(spin)
        try:
            yield
        finally:
            stop.set()
