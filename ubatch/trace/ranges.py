"""Ranges for profilers: which lane ran which stage, in `torch.profiler` and, on CUDA, in NVTX (Nsight Systems).

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

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch.profiler import record_function

from ubatch.process.interrupts import changing


class LaneRanges:
    """The ranges of one lane in one step, if they are wanted when it begins; else nothing."""

    def __init__(self, lane: int) -> None:
        self._lane = lane
        self._wanted = ranges_wanted()
        self._nvtx: Any = torch.cuda.nvtx if torch.cuda.is_initialized() else None
        self._stage = ExitStack()

    def begin(self, point: str) -> None:
        """Begin a stage at `point`; the previous one has ended."""
        if not self._wanted:
            return
        name = f"lane {self._lane} | {point}"
        self._stage.enter_context(record_function(name))
        if self._nvtx is not None:
            self._stage.callback(self._nvtx.range_end, self._nvtx.range_start(name))

    def end(self) -> None:
        """End the stage. Does nothing if none has begun."""
        self._stage.close()


_wanted: ContextVar[bool] = ContextVar("ubatch_profile_ranges", default=False)


ranges_wanted = _wanted.get
"""Returns whether lanes that start now show their ranges."""


def profile_ranges(wanted: bool = True) -> AbstractContextManager[object]:
    """Show the stages of the lanes of every wrapper call in the `with` block.

    Args:
        wanted: False does not change the current setting.
    """
    return changing(_wanted, wanted or _wanted.get())
