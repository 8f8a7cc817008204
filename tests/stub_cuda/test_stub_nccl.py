"""torch's NCCL back end over the stub, with a group of one: communicators in captures, the watchdog, `wait`."""

import time
from collections.abc import Iterator
from typing import cast

import pytest
import torch
import torch.distributed as dist
from moe_layers import Layer, make_layer, make_tokens
from nccl_alone import Collectives, check_reset, nccl_alone
from stub_cuda.counts import counted, of
from torch import Tensor

from moe import make_all2all
from ubatch import (
    CommGroup,
    ForwardContext,
    UBatchConfig,
    UBatchWrapper,
    all_gather,
    all_reduce,
    all_to_all_single,
    set_forward_context,
)

CUDA = torch.device("cuda", 0)
WATCHED_S = 3.0
"""Longer than the watchdog's and the heartbeat's intervals."""


@pytest.fixture
def world() -> Iterator[CommGroup]:
    with nccl_alone() as alone:
        yield alone


def test_what_a_rank_sends_to_itself_arrives(world: CommGroup) -> None:
    rows = torch.arange(8.0).view(4, 2)
    for collective in (all_reduce, all_gather, all_to_all_single):  # `reduce_scatter` sums by a kernel
        assert cast(Tensor, collective(rows.cuda(), world)).tolist() == rows.tolist()


def test_lanes_launch_each_collective_once(world: CommGroup) -> None:
    config = UBatchConfig(verify="off", group=world, dbo_prefill_token_threshold=2)
    wrapper = UBatchWrapper(Collectives(world).eval(), config, device=CUDA)
    x = torch.ones(64, 16, device=CUDA)
    wrapper(x)
    with counted() as found:
        wrapper(x)
    assert wrapper.statistics().engaged == 2
    assert (found["nccl AllReduce"], found["nccl AllGather"]) == (2, 2)
    assert found["nccl SendRecv"] == 4, "of `reduce_scatter` and `all_to_all_single`, in either lane"
    wrapper.close()


def test_a_captured_step_keeps_its_collectives_while_the_watchdog_watches(world: CommGroup) -> None:
    config = UBatchConfig(verify="off", group=world, dbo_prefill_token_threshold=2)
    wrapper = UBatchWrapper(Collectives(world).eval(), config, device=CUDA, cudagraph_mode="full")
    x = torch.ones(64, 16, device=CUDA)
    with counted() as found:
        wrapper.capture(x)
    assert found["captured nccl AllReduce"] == 2
    assert not of(found, "refused")
    time.sleep(WATCHED_S)
    with counted() as found:
        wrapper(x)
    assert (found["graph launch"], of(found, "nccl ")) == (1, 0)
    wrapper.close()


def test_two_communicators_in_one_capture(world: CommGroup) -> None:
    replica = dist.new_group([0], backend="nccl", device_id=CUDA)
    other = CommGroup.from_process_group(replica, timeout_s=20.0)
    x, graph, side = torch.ones(16, device=CUDA), torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def both() -> Tensor:
        return all_reduce(all_reduce(x, world), other)

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    with counted() as found, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        both()
        time.sleep(WATCHED_S)  # the watchdogs of both look at their work meanwhile
    assert found["captured nccl AllReduce"] == 2
    assert not of(found, "refused")
    graph.replay()


def test_work_is_waited_for_within_a_capture(world: CommGroup) -> None:
    x, graph = torch.arange(4.0).cuda(), torch.cuda.CUDAGraph()
    dist.all_reduce(x)
    out = torch.empty_like(x)
    with counted() as found, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        work.wait()
        out + 1
    assert found["captured nccl AllGather"] == 1
    x.copy_(torch.arange(4.0, 8.0))
    graph.replay()
    assert out.tolist() == [4.0, 5.0, 6.0, 7.0]


def test_the_layer_of_a_transport_is_captured(world: CommGroup) -> None:
    layer = make_layer(8, 128)
    routed = make_tokens(layer, 12)
    layer = Layer(layer.w13.cuda(), layer.w2.cuda())
    x, ids, weights = routed.x.cuda(), routed.ids.cuda(), routed.weights.cuda()
    all2all, graph = make_all2all("allgather_reducescatter", group=world, num_experts=8), torch.cuda.CUDAGraph()

    def there_and_back() -> Tensor:
        arrived = all2all.dispatch(x, ids, weights).wait()
        return all2all.combine(arrived.hidden_states * 2, arrived.handle).wait()

    with set_forward_context(ForwardContext(tokens_across_ranks=(12,))):
        there_and_back()
        torch.cuda.synchronize()
        with counted() as found, torch.cuda.graph(graph, capture_error_mode="thread_local"):
            there_and_back()
    assert of(found, "captured nccl") >= 2, "there, and back"
    assert not of(found, "refused")
    graph.replay()


def test_an_aborted_group_is_refused_until_it_is_reset(world: CommGroup) -> None:
    group = CommGroup.from_process_group(dist.new_group([0], backend="nccl"), timeout_s=20.0)
    check_reset(group)
