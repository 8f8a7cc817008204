"""Every transport under every schedule, as if on a GPU: no race between streams, nothing freed too early.

The real back ends, the real modular kernel and real experts run in real lanes; gloo carries the bytes, `fake_cuda`
checks the order in which streams would have run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import deep_ep_standin
import deepep_cases
import pytest
import torch
from fake_cuda import FakeCuda
from moe_layers import make_layer
from torch import Tensor, nn

from moe import EmulatedLink, SoftmaxTopKRouter, make_all2all
from moe.all2all.deepep import base as deepep
from moe.all2all.torch_dist import chunks as torch_dist_chunks
from ranks import run_ranks
from ubatch import (
    CommGroup,
    Recv,
    Schedule,
    Transfer,
    UBatchConfig,
    UBatchWrapper,
    all_reduce,
    dbo_keep,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
    get_schedule,
    launch_all_reduce,
)
from ubatch.streams.lane_streams import LaneStreams

pytestmark = pytest.mark.ranks

EXPERTS, HIDDEN, TOP_K = 8, 12, 2
NAMED = [get_schedule(name) for name in ("mlp_shared_overlap", "two_batch_prefill", "two_batch_decode")]
SCHEDULES = [
    *NAMED,
    replace(NAMED[0], name="peer", recv=Recv.PEER),
    replace(NAMED[2], name="chunks", chunks=3),
    replace(NAMED[0], name="peer_chunks", chunks=2, recv=Recv.PEER),
]
SINGLE = get_schedule("single_batch")
ALONE = [SINGLE, replace(SINGLE, name="one_dispatch", chunks=3, chunk_dispatch=False)]
SIGNALLED = [
    (get_schedule("single_batch_signalled"), 1),
    (replace(NAMED[0], name="peer_signalled", signalled=True, recv=Recv.PEER), 2),
]
CUT = replace(NAMED[1], name="chunks_of_combine", chunks=2, chunk_dispatch=False)

ONE_RANK: dict[str, dict[str, Any]] = {
    "local": {},
    "host_loopback": {"bytes_factor": 1.5},
    "host_loopback_batched": {"bytes_factor": 1.5},
    "torch_dist": {},
    "allgather_reducescatter": {},
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "torch_dist": {},
    "allgather_reducescatter": {},
    "emulated_link": {"link": EmulatedLink(1e-5, 1e9)},
}


@pytest.mark.slow
def test_one_rank() -> None:
    run_ranks(_check_all, 1, ["transports_1"])


@pytest.mark.slow
def test_one_rank_under_every_schedule() -> None:
    run_ranks(_check_all, 1, ["transports_1_all"])


@pytest.mark.slow
def test_two_ranks() -> None:
    """And what is left out of the real code is found."""
    run_ranks(_check_all, 2, ["transports_2", "collectives", "planted"])


def test_deepep_in_the_order_of_the_lanes_streams() -> None:
    """As DeepEP runs while a graph is captured; its asynchronous mode has a stream and marks of its own."""
    run_ranks(_check_all, 2, ["deepep"])


@pytest.mark.slow
def test_deepep_under_every_schedule() -> None:
    run_ranks(_check_all, 2, ["deepep_all"])


def _check_all(rank: int, ranks: int, names: list[str]) -> None:
    group = CommGroup.from_process_group(timeout_s=20.0)
    with torch.inference_mode():
        for name in names:
            CHECKS[name](rank, group)


class Stack(nn.Module):
    """Residual MoE layers with a shared expert, of which nothing is held longer than needed."""

    def __init__(self, all2all: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        layers = [make_layer(EXPERTS, HIDDEN, seed=seed) for seed in (0, 1)]
        self.kernels = nn.ModuleList(layer.kernel(all2all, shared_experts=self.shared) for layer in layers)
        self.router = SoftmaxTopKRouter(TOP_K)

    def forward(self, x: Tensor) -> Tensor:
        for kernel in self.kernels:
            weights, ids = self.router(x[:, :EXPERTS])
            x = x + kernel(x, weights, ids)
        return x


def _run(model: nn.Module, group: CommGroup | None, schedule: Schedule, lanes: int, x: Tensor) -> FakeCuda:
    """Two steps in lanes, checked; the caller works on meanwhile. The result must be that of the plain call."""
    expected = model(x)
    config = UBatchConfig(
        verify="off",
        group=group,
        schedule=schedule,
        num_ubatches=max(lanes, 2),
        dbo_prefill_token_threshold=3,
        timeout_s=20.0,
    )
    with FakeCuda().installed() as cuda, mock.patch.object(torch_dist_chunks, "_true_places", _true_places_on_cuda):
        wrapper = UBatchWrapper(model, config)
        for _ in range(2):
            result = wrapper(x) * 1
        statistics = wrapper.statistics()
        wrapper.close()
    assert statistics.engaged + statistics.engaged_single == 2, statistics
    torch.testing.assert_close(result, expected)
    return cuda


def _true_places_on_cuda(mask: Tensor, count: int) -> Tensor:
    return torch.nonzero_static(mask, size=count)


def _tokens(rank: int) -> Tensor:
    return torch.randn(7 + 4 * rank, HIDDEN, generator=torch.Generator().manual_seed(rank))


def _cases() -> Iterator[tuple[Schedule, int]]:
    for schedule in (*SCHEDULES, CUT):
        yield schedule, 2
    yield SCHEDULES[0], 3
    yield SCHEDULES[2], 3
    for schedule in ALONE:
        yield schedule, 1


USUAL = [(SCHEDULES[0], 2), (SCHEDULES[5], 2), (SCHEDULES[2], 3), (SINGLE, 1)]
"""Of `_cases`: what usual runs check of every transport."""


def _check_transports(
    transports: dict[str, dict[str, Any]], cases: Sequence[tuple[Schedule, int]], rank: int, group: CommGroup
) -> None:
    for name, options in transports.items():
        alone = name in ("local", "host_loopback", "host_loopback_batched")
        model = Stack(make_all2all(name, group=None if alone else group, num_experts=EXPERTS, **options))
        in_blocks = model.kernels[0].all2all.traits.sends_blocks
        for schedule, lanes in (*cases, *(SIGNALLED if in_blocks else ())):
            cuda = _run(model, None if alone else group, schedule, lanes, _tokens(rank))
            what = f"{name}, {schedule.name}, {lanes} lanes"
            cuda.check(what)
            travelled = cuda.counts["comm"] + cuda.counts["nccl"]
            assert (travelled > 0) is (name != "local"), f"{what}: {cuda.counts}"
            syncs = {sync for sync in cuda.syncs if "experts" not in sync}  # the grouped loop reads its offsets
            assert not syncs, f"{what}: the host waited for a whole stream: {syncs}"


def _check_collectives(rank: int, group: CommGroup) -> None:
    """A dense layer split over the ranks, as tensor parallelism has it."""

    class Dense(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = all_reduce(x.sin(), group) * 0.5
            return x

    class Switching(nn.Module):
        """The same, launched between two points that switch streams."""

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x.sin()
                dbo_yield_and_switch_from_compute_to_comm()
                transfer = launch_all_reduce(x, group)
                dbo_keep(x)
                del x
                dbo_yield_and_switch_from_comm_to_compute()
                x = transfer.wait() * 0.5
                del transfer
            return x

    for model in (Dense(), Switching()):
        for schedule, lanes in _cases():
            cuda = _run(model, group, schedule, lanes, torch.ones(8, HIDDEN))
            cuda.check(f"{type(model).__name__}, {schedule.name}, {lanes} lanes")
            assert cuda.counts["nccl"] == 2 * 3 * lanes


def _check_deepep(schedules: Sequence[Schedule], rank: int, group: CommGroup) -> None:
    with deep_ep_standin.installed():
        for name in deepep_cases.BACKENDS:
            layers = [deepep_cases.layer_of(seed) for seed in (0, 1)]
            model = deepep_cases.Stack(layers, deepep_cases.transport(name, group))
            x = deepep_cases.rows_of(6, rank)
            for schedule in schedules:
                _run_deepep(model, group, schedule, x)  # makes the buffers
                with mock.patch.object(deepep, "capturing", return_value=True):
                    cuda = _run_deepep(model, group, schedule, x)
                cuda.check(f"{name}, {schedule.name}")
                in_lanes_order = name != "deepep_low_latency"  # short kernels on the compute stream; RDMA travels alone
                assert (cuda.counts["comm"] > 0) is in_lanes_order, cuda.counts


def _run_deepep(model: nn.Module, group: CommGroup, schedule: Schedule, x: Tensor) -> FakeCuda:
    with FakeCuda().installed() as cuda:
        wrapper = deepep_cases.lanes_of(model, group, schedule)
        wrapper(x)
        wrapper.close()
    return cuda


# ------------------------------------------------------------------------------------------------------ planted errors


def _check_planted(rank: int, group: CommGroup) -> None:
    """Each left out in turn, in the real code."""
    model = Stack(make_all2all("torch_dist", group=group, num_experts=EXPERTS))

    def run(*patches: Any) -> FakeCuda:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            return _run(model, group, SCHEDULES[0], 2, _tokens(rank))

    no_join = run(mock.patch.object(LaneStreams, "join_comm"))
    assert any("reads" in race and "alltoall_base_" in race for race in no_join.races), no_join.races[:3]

    make_transfer = Transfer.__init__
    keeps_nothing = mock.patch.object(
        Transfer, "__init__", lambda self, *args, **kwargs: make_transfer(self, *args, **{**kwargs, "keep": ()})
    )
    no_keep = run(keeps_nothing)
    assert not no_keep.races
    assert any("alltoall_base_ on nccl may still use" in each for each in no_keep.lifetimes), no_keep.lifetimes[:3]

    no_fork = run(mock.patch.object(LaneStreams, "enter_comm", _enter_comm_without_fork))
    assert any("alltoall_base_ on nccl reads" in race for race in no_fork.races), no_fork.races[:3]


def _enter_comm_without_fork(lane: Any, **how: Any) -> None:
    if not lane.on_comm:
        lane._streams.set_current(lane.comm_stream)
        lane.on_comm = True


CHECKS: dict[str, Callable[[int, CommGroup], None]] = {
    "transports_1": partial(_check_transports, ONE_RANK, USUAL),
    "transports_1_all": partial(_check_transports, ONE_RANK, list(_cases())),
    "transports_2": partial(_check_transports, TWO_RANKS, list(_cases())),
    "collectives": _check_collectives,
    "deepep": partial(_check_deepep, [SCHEDULES[5]]),
    "deepep_all": partial(_check_deepep, SCHEDULES),
    "planted": _check_planted,
}
