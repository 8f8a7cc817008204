"""Chunks of experts on a GPU: one lane and several, eagerly and in a graph, give what the plain call does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from signalled_cases import Model, inputs, overlapped
from torch import Tensor

from ubatch import CUDAGraphMode, Schedule, get_schedule, tracing

SIZES, TOKENS, BF16 = (8, 256, 64), 96, torch.bfloat16
SINGLE, TWO = get_schedule("single_batch"), get_schedule("mlp_shared_overlap")
SCHEDULES = [
    SINGLE,
    replace(SINGLE, name="combine_only", chunks=3, chunk_dispatch=False),
    replace(SINGLE, name="with_sms", comm_sms=8),
    replace(TWO, name="two_by_two", chunks=2),
    replace(TWO, name="two_by_three", chunks=3, chunk_dispatch=False),
]


def made(experts: str) -> tuple[Model, Tensor, Tensor]:
    """Two layers over host memory, with a shared expert; and their inputs."""
    x, is_token = inputs(TOKENS, 0, SIZES[1])
    return Model("host_loopback", experts, SIZES, BF16, "cuda").eval(), x.cuda().to(BF16), is_token.cuda()


def close(actual: Tensor, expected: Tensor) -> None:
    difference = (actual.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)
    assert difference.max() < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@torch.inference_mode()
def test_eager(schedule: Schedule) -> None:
    model, *given = made("grouped")
    expected = model(*given)
    with overlapped(model, schedule) as wrapper, tracing() as trace:
        outputs = [wrapper(*given) for _ in range(20)]
        torch.cuda.synchronize()
    for output in outputs:
        assert torch.equal(output, outputs[0]), "a race, or memory that was freed too early"
    close(outputs[0], expected)
    launches = sum(event.name.startswith("combine.") for event in trace.events if event.kind == "launch")
    assert launches == 20 * 2 * schedule.lanes * schedule.chunks


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@torch.inference_mode()
def test_captured(schedule: Schedule) -> None:
    pytest.importorskip("triton", reason="Triton is not installed, and other experts cannot be captured")
    model, x, is_token = made("triton")
    with overlapped(model, schedule, CUDAGraphMode.FULL) as wrapper:
        with wrapper.no_timeout():
            eager = wrapper(x, is_token).clone()
            wrapper.capture(x, is_token)
        for _ in range(20):
            y = torch.randn_like(x)
            close(wrapper(y, is_token), model(y, is_token))
        close(wrapper(x, is_token), eager)
        assert wrapper.statistics().graph_replays == 21
