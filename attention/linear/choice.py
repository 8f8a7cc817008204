"""Which plan the linear layers have: Triton's kernels on a GPU, else C or torch. Only Triton's can be captured."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from attention.linear.plan import LinearPlan
from attention.linear.states import StatePool
from attention.metadata import CommonAttentionMetadata

if TYPE_CHECKING:
    from attention.linear.triton_plan import LinearRecords


def runs_in_triton(device: torch.device) -> bool:
    """Whether linear layers on this device run in Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def make_linear_plan(pool: StatePool, metadata: CommonAttentionMetadata) -> LinearPlan:
    """The plan of a step; raises the errors of `LinearPlan`."""
    if not runs_in_triton(pool.device):
        return LinearPlan(pool, metadata)
    from attention.linear.triton_plan import TritonLinearPlan  # imports Triton

    return TritonLinearPlan(pool, metadata)


def make_linear_records(pool: StatePool, max_reqs: int) -> LinearRecords:
    """What captured plans read of up to `max_reqs` requests; only where `runs_in_triton`."""
    from attention.linear.triton_plan import LinearRecords  # imports Triton

    return LinearRecords(pool, max_reqs)
