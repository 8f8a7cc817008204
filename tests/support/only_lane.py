"""A body as the only lane of a schedule: single-batch overlap without a model around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import torch
from torch import Tensor

from ubatch import CommGroup, Schedule, Trace, tracing
from ubatch.lanes.workers import SingleLane

__all__ = ["alone"]


def alone(group: CommGroup | None, schedule: Schedule, body: Callable[[], Tensor]) -> tuple[Tensor, Trace]:
    """Run `body` as the only lane."""
    with closing(SingleLane(torch.device("cpu"))) as lane, tracing() as trace:
        trace.step = 1
        (output,) = lane.run([body], schedule, [None], frozenset(() if group is None else group.ranks))
    return output, trace
