"""Chunks of experts in captured graphs, on the device that records every operation: replays equal the plain call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graph_cases import graphed
from torch import Tensor, nn

from moe import FusedMoEModularKernel, SoftmaxTopKRouter, make_all2all
from ubatch import Schedule, get_schedule

pytestmark = pytest.mark.long

EXPERTS, HIDDEN, TOP_K = 8, 12, 3
SINGLE, TWO = get_schedule("single_batch"), get_schedule("mlp_shared_overlap")
SCHEDULES = [
    SINGLE,
    replace(SINGLE, name="one_dispatch", chunks=3, chunk_dispatch=False),
    replace(TWO, name="two_by_two", chunks=2),
    replace(get_schedule("two_batch_decode"), name="two_by_three", chunks=3, chunk_dispatch=False),
]


class Scaling(nn.Module):
    """Experts that multiply, and read nothing on the host."""

    expert_range, capturable = range(EXPERTS), True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.linspace(0.1, 1.7, EXPERTS))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        factors = torch.where(ids < 0, 0.0, self.factors[ids.clamp(min=0).long()] * weights)
        return factors.sum(1, keepdim=True) * x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        transport = make_all2all("host_loopback", group=None, num_experts=EXPERTS)
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        self.kernels = nn.ModuleList(FusedMoEModularKernel(transport, Scaling(), self.shared) for _ in range(2))
        self.router = SoftmaxTopKRouter(TOP_K)

    def forward(self, x: Tensor) -> Tensor:
        for kernel in self.kernels:
            weights, ids = self.router(x[:, :EXPERTS])
            x = x + kernel(x, weights, ids)
        return x


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_replays(schedule: Schedule) -> None:
    model = Model()
    with graphed(model, schedule=schedule) as case:
        captured = case.wrapper.capture(case.x(6, HIDDEN))
        assert captured.key.schedule == schedule.name
        for _ in range(3):
            x = case.x(6, HIDDEN)
            torch.testing.assert_close(case.wrapper(x), model(x))
        statistics = case.wrapper.statistics()
        assert statistics.graph_replays == 3, statistics
        single = schedule.lanes == 1
        assert (statistics.engaged, statistics.engaged_single) == ((0, 3) if single else (3, 0)), statistics
