"""Chunks of experts on a GPU: one lane and several, eagerly and in a graph, give what the plain call does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_layers import make_layer
from torch import Tensor, nn

from moe import SoftmaxTopKRouter, make_all2all, make_experts
from moe.modular_kernel import FusedMoEModularKernel
from ubatch import CUDAGraphMode, UBatchConfig, UBatchWrapper, get_schedule, tracing

EXPERTS, HIDDEN, TOP_K, TOKENS = 8, 256, 3, 96
SINGLE, TWO = get_schedule("single_batch"), get_schedule("mlp_shared_overlap")
SCHEDULES = [
    SINGLE,
    replace(SINGLE, name="combine_only", chunks=3, chunk_dispatch=False),
    replace(SINGLE, name="with_sms", comm_sms=8),
    replace(TWO, name="two_by_two", chunks=2),
    replace(TWO, name="two_by_three", chunks=3, chunk_dispatch=False),
]


class Model(nn.Module):
    """Two layers over host memory, with a shared expert."""

    def __init__(self, experts: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        transport = make_all2all("host_loopback", group=None, num_experts=EXPERTS)
        self.shared = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)
        layers = [make_layer(EXPERTS, HIDDEN, 64, seed=seed, dtype=torch.bfloat16) for seed in (0, 1)]
        held = [make_experts(experts, layer.w13.cuda(), layer.w2.cuda()) for layer in layers]
        self.kernels = nn.ModuleList(FusedMoEModularKernel(transport, each, self.shared) for each in held)
        self.router = SoftmaxTopKRouter(TOP_K)

    def forward(self, x: Tensor) -> Tensor:
        # Routed by the input alone: other tiles round a layer differently, and a near tie is then another expert.
        logits = x.float().split(EXPERTS, dim=1)
        for layer, kernel in enumerate(self.kernels):
            weights, ids = self.router(logits[layer])
            x = x + kernel(x, weights, ids)
        return x


def close(actual: Tensor, expected: Tensor) -> None:
    difference = (actual.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)
    assert difference.max() < 2e-2


def wrapped(model: nn.Module, schedule: Any, mode: CUDAGraphMode) -> UBatchWrapper:
    config = UBatchConfig(verify="off", schedule=schedule, dbo_prefill_token_threshold=2, require_overlap=True)
    return UBatchWrapper(model, config, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@torch.inference_mode()
def test_eager(schedule: Any) -> None:
    model = Model("grouped").cuda().eval()
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    expected = model(x)
    wrapper = wrapped(model, schedule, CUDAGraphMode.NONE)
    with tracing() as trace:
        outputs = [wrapper(x) for _ in range(20)]
    torch.cuda.synchronize()
    for output in outputs:
        assert torch.equal(output, outputs[0]), "a race, or memory that was freed too early"
    close(outputs[0], expected)
    launches = sum(event.name.startswith("combine.") for event in trace.events if event.kind == "launch")
    assert launches == 20 * 2 * schedule.lanes * schedule.chunks
    wrapper.close()


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@torch.inference_mode()
def test_captured(schedule: Any) -> None:
    pytest.importorskip("triton", reason="Triton is not installed, and other experts cannot be captured")
    model = Model("triton").cuda().eval()
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    wrapper = wrapped(model, schedule, CUDAGraphMode.FULL)
    with wrapper.no_timeout():
        eager = wrapper(x).clone()
        wrapper.capture(x)
    for _ in range(20):
        y = torch.randn_like(x)
        close(wrapper(y), model(y))
    close(wrapper(x), eager)
    assert wrapper.statistics().graph_replays == 21
    wrapper.close()
