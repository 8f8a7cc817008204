"""Ranges for profilers: which lane ran which stage, in `torch.profiler` and, on CUDA, in NVTX (Nsight Systems).

    with profile_ranges():              or UBatchConfig(profile_ranges=True)
        wrapper(x)

    lane 0 | start      from the lane's first turn to its first point
    lane 0 | dispatch   from when the baton is back from point `dispatch` (or it was kept there) to the next point

A range is open only while its lane holds the baton, and a lane has one at a time, so those of one thread follow one
another. In NVTX they are start/end ranges, not pushed ones: a range that the model itself pushes may span points, and
a pop takes whatever is on top.

`torch.profiler` looks at the thread that starts it, and lanes are others: without its switch for all threads it shows
neither their ranges nor their operations. In torch 2.11 to 2.13 that is

    all_threads = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=all_threads) as profiler:
        wrapper(x)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch.profiler import record_function

from ubatch.process.interrupts import changing

__all__ = ["LaneRanges", "profile_ranges", "ranges_wanted"]


class LaneRanges:
    """The ranges of one lane in one step.

    Args:
        lane: its number.
    """

    def __init__(self, lane: int) -> None:
        self._lane = lane
        self._recorded: record_function | None = None
        self._nvtx: Any = torch.cuda.nvtx if torch.cuda.is_initialized() else None
        self._handle: Any = None

    def begin(self, point: str) -> None:
        """The lane begins a stage at `point`; the previous one has ended."""
        name = f"lane {self._lane} | {point}"
        self._recorded = record_function(name)
        self._recorded.__enter__()
        if self._nvtx is not None:
            self._handle = self._nvtx.range_start(name)

    def end(self) -> None:
        """The stage is over. Nothing happens if none has begun."""
        recorded, self._recorded = self._recorded, None
        if recorded is None:
            return
        if self._nvtx is not None:
            self._nvtx.range_end(self._handle)
        recorded.__exit__(None, None, None)


_wanted: ContextVar[bool] = ContextVar("ubatch_profile_ranges", default=False)


def ranges_wanted() -> bool:
    """Whether lanes that start now shall show their ranges."""
    return _wanted.get()


def profile_ranges(wanted: bool = True) -> AbstractContextManager[object]:
    """Show the stages of the lanes of every wrapper call in the `with` block.

    Args:
        wanted: False leaves things as they are around the block.
    """
    return changing(_wanted, wanted or _wanted.get())
