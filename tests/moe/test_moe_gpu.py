"""Transports on a GPU, with the one rank that it can be, and layers in chunks: results, no waiting, capture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from host_waits import no_host_waits
from moe_layers import Layer, Routed, make_layer, make_tokens
from nccl_alone import nccl_alone
from signalled_cases import Model, inputs, overlapped
from torch import Tensor

from moe import dequantize_blocks, make_all2all, mask_padding, quantize_blocks
from ubatch import CommGroup, CUDAGraphMode, ForwardContext, Schedule, get_schedule, set_forward_context, tracing

pytestmark = pytest.mark.gpu

SIZES, BF16 = (8, 256, 64), torch.bfloat16
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
    x, is_token = inputs(96, 0, SIZES[1])
    return Model("host_loopback", experts, SIZES, BF16, "cuda").eval(), x.cuda().to(BF16), is_token.cuda()


def close(actual: Tensor, expected: Tensor) -> None:
    difference = (actual.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)
    assert difference.max() < 2e-2


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


EXPERTS, HIDDEN, TOKENS = 8, 128, 12


@pytest.fixture
def group() -> Iterator[CommGroup]:
    with nccl_alone() as alone:
        yield alone


def _on_gpu() -> tuple[Layer, Routed]:
    layer = make_layer(EXPERTS, HIDDEN)
    routed = make_tokens(layer, TOKENS, unrouted=0.2)
    return Layer(layer.w13.cuda(), layer.w2.cuda()), Routed(routed.x.cuda(), routed.ids.cuda(), routed.weights.cuda())


@pytest.mark.parametrize("name", ["torch_dist", "allgather_reducescatter"])
def test_results(name: str, group: CommGroup) -> None:
    layer, routed = _on_gpu()
    kernel = layer.kernel(make_all2all(name, group=group, num_experts=EXPERTS))
    actual = kernel(routed.x, routed.weights, routed.ids)
    torch.testing.assert_close(actual, layer.expected(routed), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["torch_dist", "allgather_reducescatter"])
def test_the_host_waits_for_counts_at_most(name: str, group: CommGroup) -> None:
    """Nothing of a dispatch or combine waits for the device but what says so: `torch_dist`, for its counts."""
    _, routed = _on_gpu()
    ids = mask_padding(routed.ids, TOKENS - 2)
    all2all = make_all2all(name, group=group, num_experts=EXPERTS)
    assert all2all.traits.capturable is (name == "allgather_reducescatter")

    def there_and_back() -> torch.Tensor:
        arrived = all2all.dispatch(routed.x, ids, routed.weights).wait()
        return all2all.combine(arrived.hidden_states.contiguous(), arrived.handle).wait()

    with set_forward_context(ForwardContext(tokens_across_ranks=(TOKENS - 2,))):
        there_and_back()  # makes the communicator
        with no_host_waits():
            home = there_and_back()
    visited = (ids >= 0).any(1, keepdim=True) if name == "torch_dist" else torch.ones(TOKENS, 1, device="cuda")
    visited = visited * (torch.arange(TOKENS, device="cuda") < TOKENS - 2).unsqueeze(1)
    torch.testing.assert_close(home, routed.x * visited)


def test_capture(group: CommGroup) -> None:
    """`allgather_reducescatter` in a graph: replays with other tokens equal eager calls."""
    _, routed = _on_gpu()
    all2all = make_all2all("allgather_reducescatter", group=group, num_experts=EXPERTS)
    x, graph = routed.x.clone(), torch.cuda.CUDAGraph()

    def there_and_back() -> torch.Tensor:
        arrived = all2all.dispatch(x, routed.ids, routed.weights).wait()
        return all2all.combine(arrived.hidden_states * 2, arrived.handle).wait()

    with set_forward_context(ForwardContext(tokens_across_ranks=(TOKENS,))):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there_and_back()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            home = there_and_back()
        for seed in range(3):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert torch.equal(home, x * 2)


def test_quantization_is_the_cpus() -> None:
    x = torch.randn(7, 512).to(torch.bfloat16)
    (ours, scales), (theirs, their_scales) = quantize_blocks(x.cuda()), quantize_blocks(x)
    assert torch.equal(scales.cpu(), their_scales)
    assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
    restored = dequantize_blocks(ours, scales, torch.bfloat16).cpu()
    assert torch.equal(restored, dequantize_blocks(theirs, their_scales, torch.bfloat16))
