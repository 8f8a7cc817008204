"""Records one lane's step: stages and waits for the trace, and ranges for profilers.

A stage is a lane's compute from one event (a point, a launch, the end of a wait) to the next. A lane has a recorder
only if a trace or ranges are wanted; otherwise a point costs one comparison with None.

Ranges for profilers: which lane ran which stage, in `torch.profiler` and, on CUDA, in NVTX (Nsight Systems).

    with profile_ranges():              or UBatchConfig(profile_ranges=True)
        wrapper(x)

    lane 0 | start      from the lane's first turn to its first point
    lane 0 | dispatch   from the baton's return at point `dispatch` (or from the point, if it was kept) to the next
                        point

A range is open only while its lane holds the baton, and a lane has one at a time, so ranges of one thread do not
overlap. In NVTX they are start/end ranges, not push/pop ranges: the model's own pushed range may span points, and a pop
always removes the topmost range.

`torch.profiler` records only the thread that starts it. Lanes are other threads: their ranges and operations are shown
only with its option for all threads. In torch 2.11 to 2.13 that is

    all_threads = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=all_threads) as profiler:
        wrapper(x)
"""

import time
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch.profiler import record_function

from ubatch.process.interrupts import changing
from ubatch.trace.spans import Event, EventKind, LinkTime, SpanKind, Trace

_wanted: ContextVar[bool] = ContextVar("ubatch_profile_ranges", default=False)
ranges_wanted = _wanted.get
"""Returns whether lanes that start now show their ranges."""


def profile_ranges(wanted: bool = True) -> AbstractContextManager[object]:
    """Show the stages of the lanes of every wrapper call in the `with` block.

    Args:
        wanted: False does not change the current setting.
    """
    return changing(_wanted, wanted or _wanted.get())


class LaneRecorder:
    """Records one lane's step, in the lane's own thread.

    Args:
        trace: None if only ranges are wanted.
    """

    def __init__(self, lane: int, trace: Trace | None) -> None:
        self._lane = lane
        self._trace = trace
        self._shows_ranges = ranges_wanted()
        self._range = ExitStack()
        self._nvtx: Any = torch.cuda.nvtx if torch.cuda.is_initialized() else None
        self._start = self._cpu = 0.0
        self._wait: tuple[float, float] | None = None

    def begin(self) -> None:
        """The lane has the baton for the first time."""
        self._begin_range("start")
        self._begin_stage()

    def reach(self, point: str, *, active: bool, layer: str = "") -> None:
        """The lane reaches a point in a kind of layer; `active` if the schedule hands on there."""
        self._range.close()
        self._end_stage(EventKind.POINT, point, layer)
        if active and self._trace is not None:
            self._trace.order.append((self._lane, point))

    def go_on(self, point: str, *, active: bool, layer: str = "") -> None:
        """The lane continues after the point; time of other lanes in between does not count."""
        if active:
            self._begin_stage()
        self._begin_range(f"{point} of {layer}" if layer else point)

    def launch(self, key: str) -> None:
        """The lane launches a transfer."""
        self._end_stage(EventKind.LAUNCH, key)
        if self._trace is not None:
            self._trace.add_launch(self._lane, key, self._start)

    def begin_wait(self) -> None:
        """The lane starts to wait for a transfer."""
        self._wait = (time.monotonic(), time.process_time())

    def end_wait(self, name: str, key: str, link: LinkTime, launcher: int | None, now: float) -> None:
        """The wait is over; see `UBatchContext.end_wait`."""
        trace = self._trace
        if trace is None or self._wait is None:
            return
        (start, cpu), cpu_now = self._wait, time.process_time()
        trace.add(SpanKind.COMPUTE, name, self._lane, self._start, start)
        trace.add_wait(name, self._lane, start, now, self._lane if launcher is None else launcher, key)
        stage_cpu = cpu - self._cpu
        self._start = now
        if launcher == self._lane:
            trace.events.append(Event(trace.step, self._lane, EventKind.WAIT, key, stage_cpu, cpu_now - cpu, link))
            self._cpu = cpu_now
            return
        self._cpu = cpu_now - stage_cpu  # this lane's stage continues
        if launcher is not None:
            trace.events.append(Event(trace.step, launcher, EventKind.WAIT, key, 0.0, cpu_now - cpu, link))

    def end(self, *, failed: bool) -> None:
        """The lane ends; the last stage of a step that `failed` is not recorded."""
        self._range.close()
        if self._trace is not None and not failed:
            self._end_stage(EventKind.END, "end")
            self._trace.order.append((self._lane, "end"))

    def _begin_range(self, point: str) -> None:
        """Begin the range of a stage at `point`, if ranges are wanted; the previous one has ended."""
        if not self._shows_ranges:
            return
        name = f"lane {self._lane} | {point}"
        self._range.enter_context(record_function(name))
        if self._nvtx is not None:
            self._range.callback(self._nvtx.range_end, self._nvtx.range_start(name))

    def _begin_stage(self) -> None:
        self._start, self._cpu = time.monotonic(), time.process_time()

    def _end_stage(self, kind: EventKind, name: str, layer: str = "") -> None:
        """Record the compute since the previous event, and begin the next stage."""
        trace = self._trace
        if trace is None:
            return
        now, cpu = time.monotonic(), time.process_time()
        trace.add(SpanKind.COMPUTE, name, self._lane, self._start, now, layer=layer)
        trace.events.append(Event(trace.step, self._lane, kind, name, cpu - self._cpu, layer=layer))
        self._start, self._cpu = now, cpu


def make_recorder(lane: int, trace: Trace | None) -> LaneRecorder | None:
    """A recorder for a lane that begins a step now; None if neither a trace nor ranges are wanted."""
    return None if trace is None and not ranges_wanted() else LaneRecorder(lane, trace)
