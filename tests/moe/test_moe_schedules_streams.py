"""Every transport x every named schedule x 1 to 3 lanes x 1 to 3 chunks, as if on a GPU.

Whatever traits and schedule allow has no race between streams, frees nothing too early, and gives what the plain call
gives. The rest is refused by name before anything is launched, and the ranks go on. Real transports, kernel and experts
run in real lanes; gloo carries the bytes, `fake_cuda` checks the order in which streams would have run them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import all2all_bench
import deep_ep_standin
import pytest
import torch
import torch._dynamo  # the fake device's modes import it, for seconds: once, before ranks are forked
from deep_ep_standin_events import calls
from deepep_device import deepep_device
from fake_cuda import FakeCuda
from moe_layers import Stack, lanes_of, run_checks
from torch import Tensor, nn

from moe import FusedMoEModularKernel, SignallingExperts
from moe.all2all.deepep import base as deepep
from moe.all2all.deepep.auto import DeepEPAutoAll2All
from moe.all2all.torch_dist import chunks as torch_dist_chunks
from ranks import run_ranks
from ubatch import (
    SCHEDULES,
    CommGroup,
    ConfigError,
    ForwardContext,
    ForwardMode,
    PeerFailed,
    Recv,
    Schedule,
    Transfer,
    all_reduce,
    dbo_keep,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
    launch_all_reduce,
    set_forward_context,
)
from ubatch.streams import streams
from ubatch.streams.lane_streams import LaneStreams


@dataclass(frozen=True)
class Case:
    """A transport of `all2all_bench` under schedules.

    Attributes:
        base: the back end, its options, rows and ranks.
        experts: back end of the experts.
        captured: DeepEP launches as it does while a graph is captured.
        named: schedules; where they are not all, another case of the back end has all.
    """

    base: all2all_bench.Case
    experts: str = "grouped"
    captured: bool = False
    named: tuple[str, ...] = tuple(SCHEDULES)

    @property
    def deepep(self) -> bool:
        """Whether DeepEP is in it."""
        return not self.base.any_ids

    @property
    def tolerance(self) -> float:
        """Of a token's row, relative. A last bit more in bfloat16 can be the next step of fp8 in the second layer."""
        return 6e-2 if "use_fp8" in self.base.options else self.base.tolerance


SOME = ("mlp_shared_overlap", "two_batch_decode")
CONTRACT = all2all_bench.CASES
CASES = {
    name: Case(base, named=tuple(SCHEDULES) if name == base.name or "decode" in name else SOME)
    for name, base in CONTRACT.items()
} | {
    "host_loopback_batched, signalling experts": Case(
        CONTRACT["host_loopback_batched"], "triton_batched", named=("single_batch_signalled",)
    ),
    "deepep_high_throughput, captured": Case(CONTRACT["deepep_high_throughput"], captured=True, named=SOME),
    "deepep_v2, captured": Case(CONTRACT["deepep_v2"], captured=True, named=SOME),
}


QUICK = (
    *("local", "host_loopback", "deepep_low_latency, one buffer"),
    *("deepep_high_throughput, captured", "deepep_v2, fp8 without counts"),
)


def schedules(named: Sequence[str] = tuple(SCHEDULES)) -> Iterator[Schedule]:
    """Named ones in every size, once where two are the same; and the first with one dispatch, or received by peers."""
    first = SCHEDULES[named[0]]
    variants = [
        replace(first, name="received by the peer", recv=Recv.PEER),
        replace(first, name="one dispatch for all chunks", chunk_dispatch=False),
        replace(first, name="every point", points_off=frozenset()),
    ]
    seen = set()
    for schedule in (*map(SCHEDULES.__getitem__, named), *variants):
        for lanes in (1, 2, 3):
            for chunks in (1, 2, 3):
                sized = replace(schedule, lanes=lanes, chunks=chunks)
                if _same_as(sized) not in seen and (lanes > 1 or sized.recv is Recv.OWNER):
                    seen.add(_same_as(sized))
                    yield sized


def _same_as(schedule: Schedule) -> Schedule:
    """Without what makes no difference: its name; for one chunk, its dispatch; for one lane, who hands on where."""
    one_chunk = {"chunk_dispatch": True} if schedule.chunks == 1 else {}
    one_lane: dict[str, Any] = {"lead": 0, "points_off": frozenset()} if schedule.lanes == 1 else {}
    return replace(schedule, name="", **one_chunk, **one_lane)


def refusal(schedule: Schedule, kernel: FusedMoEModularKernel, mode: ForwardMode) -> str | None:
    """What the layer says to a schedule that its transport or its experts do not serve."""
    all2all, name = kernel.all2all, type(kernel.all2all).__name__
    if isinstance(all2all, DeepEPAutoAll2All):
        all2all = all2all.low_latency if mode is ForwardMode.DECODE else all2all.high_throughput
    traits = all2all.traits
    if schedule.chunks > traits.max_chunks:
        return f"has {schedule.chunks} chunks, but all2all back end {name} .* serves {traits.max_chunks}"
    if schedule.chunks > 1 and not schedule.chunk_dispatch and traits.cuts_combine is None:
        return f"but {name} cannot have two combines of one dispatch under way"
    if schedule.signalled and traits.sends_blocks:
        return f"does by blocks of experts of one dispatch, not of {schedule.chunks}" if schedule.chunks > 1 else None
    if schedule.signalled and not traits.signals:
        return f"begins while its experts are still computed, which {name} cannot do"
    if schedule.signalled and not isinstance(kernel.experts, SignallingExperts):
        return f"but {type(kernel.experts).__name__} do not say what is done"
    return None


def stack_of(case: Case, group: CommGroup | None) -> Stack:
    bench = all2all_bench.Bench(case.base, 0 if group is None else group.rank, group)
    return Stack([bench.layer(seed=seed) for seed in (0, 1)], bench.all2all, case.experts, shared=True)


def rows_of(case: Case, rank: int) -> Tensor:
    """Enough where chunks signal: of one without rows, whose kernel sets nothing, the device would see no write."""
    tokens = 48 if case.experts == "triton_batched" else 7 + 4 * rank
    x = torch.randn(tokens, case.base.hidden, generator=torch.Generator().manual_seed(rank))
    return x.to(case.base.dtypes[0])


def test_what_is_tried() -> None:
    sizes = {(lanes, chunks) for lanes in (1, 2, 3) for chunks in (1, 2, 3)}
    tried = {_same_as(schedule) for schedule in schedules()}
    for schedule in SCHEDULES.values():
        assert {_same_as(replace(schedule, lanes=lanes, chunks=chunks)) for lanes, chunks in sizes} <= tried
    assert {case.base.name for case in CASES.values() if case.named == tuple(SCHEDULES)} == {
        base.name for base in CONTRACT.values()
    }


@pytest.mark.parametrize(
    ("name", "lanes"),
    [
        pytest.param(name, lanes, marks=[] if lanes == 2 and name in QUICK else pytest.mark.slow)
        for name in CASES
        for lanes in (1, 2, 3)
    ],
)
def test_no_race_or_refused_by_name(name: str, lanes: int) -> None:
    if CASES[name].experts == "triton_batched":
        pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    run_ranks(_check, CASES[name].base.ranks, name, lanes)


def _check(rank: int, ranks: int, name: str, lanes: int) -> None:
    case = CASES[name]
    with torch.inference_mode(), deep_ep_standin.installed(in_torch=True):
        deep_ep_standin.Buffer.shared_by_lanes = "share_buffer" in case.base.options
        group = CommGroup.from_process_group(timeout_s=20.0) if ranks > 1 else None
        model = stack_of(case, group)
        x = rows_of(case, rank)
        expected = model(x)
        ran = 0
        for schedule in schedules(case.named):
            if schedule.lanes != lanes:
                continue
            what = f"{name}: {schedule.name}, {schedule.lanes} lanes x {schedule.chunks} chunks"
            why = refusal(schedule, model.kernels[0], case.base.mode)
            with set_forward_context(ForwardContext(mode=case.base.mode, num_tokens=x.shape[0])):
                if why is None:
                    _check_runs(model, group, schedule, case, x, expected, what)
                    ran += 1
                else:
                    _check_refused(model, group, schedule, x, why, what)
        assert ran, "some are served"


def _check_runs(
    model: Stack, group: CommGroup | None, schedule: Schedule, case: Case, x: Tensor, expected: Tensor, what: str
) -> None:
    captured = mock.patch.object(deepep, "capturing", return_value=True) if case.captured else nullcontext()
    with deepep_device() as cuda, closing(lanes_of(model, group, schedule, schedule.lanes)) as wrapper:
        with captured, mock.patch.object(streams, "CudaStreams", return_value=cuda):  # of a step outside lanes
            result = wrapper(x) * 1
        statistics = wrapper.statistics()
    assert statistics.engaged == (schedule.lanes > 1), f"{what}: {statistics}"
    assert statistics.engaged_single == schedule.single_batch, f"{what}: {statistics}"
    error = (result - expected).float().norm(dim=1) / expected.float().norm(dim=1)
    assert (error < case.tolerance).all(), f"{what}: tokens are wrong by {error.tolist()}"
    cuda.check(what)
    if not case.deepep and schedule.overlaps:
        travelled = cuda.counts["comm"] + cuda.counts["nccl"]
        assert (travelled > 0) is (case.base.name != "local"), f"{what}: {cuda.counts}"
        syncs = {sync for sync in cuda.syncs if "experts" not in sync}  # the grouped loop reads its offsets
        assert model.kernels[0].all2all.traits.blocks_host or not syncs, (
            f"{what}: the host waited for a whole stream: {syncs}"
        )


def _check_refused(model: Stack, group: CommGroup | None, schedule: Schedule, x: Tensor, why: str, what: str) -> None:
    follows_the_vote = isinstance(model.kernels[0].all2all, DeepEPAutoAll2All)
    calls.clear()
    with (
        deepep_device() as cuda,
        closing(lanes_of(model, group if follows_the_vote else None, schedule, schedule.lanes)) as wrapper,
        pytest.raises((ConfigError, PeerFailed), match=why),  # a peer may have been refused before this rank began
    ):
        wrapper(x)
    assert not calls, f"{what}: {calls}"
    assert not any(cuda.counts[stream] for stream in ("comm", "nccl")), f"{what}: {cuda.counts}"
    if follows_the_vote and group is not None:
        group.reset()  # as after any step that fails


# -------------------------------------------------------------------------------- other collectives, and planted errors


@pytest.mark.slow
def test_collectives_and_what_is_left_out_of_the_real_code() -> None:
    run_checks(_check_collectives, _check_planted)


def _run(model: nn.Module, group: CommGroup | None, schedule: Schedule, x: Tensor) -> FakeCuda:
    """Two steps in lanes, checked; the caller works on meanwhile. The result must be that of the plain call."""
    expected = model(x)
    with FakeCuda().installed() as cuda, mock.patch.object(torch_dist_chunks, "_true_places", _true_places_on_cuda):
        wrapper = lanes_of(model, group, schedule, schedule.lanes)
        for _ in range(2):
            result = wrapper(x) * 1
        statistics = wrapper.statistics()
        wrapper.close()
    assert statistics.engaged + statistics.engaged_single == 2, statistics
    torch.testing.assert_close(result, expected)
    return cuda


def _true_places_on_cuda(mask: Tensor, count: int) -> Tensor:
    return torch.nonzero_static(mask, size=count)


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
        for schedule in schedules():
            if schedule.overlaps and not schedule.signalled:
                cuda = _run(model, group, schedule, torch.ones(8, 12))
                cuda.check(f"{type(model).__name__}, {schedule.name}, {schedule.lanes} lanes")
                assert cuda.counts["nccl"] == 2 * 3 * schedule.lanes


def _check_planted(rank: int, group: CommGroup) -> None:
    """Each left out in turn, in the real code."""
    case = CASES["torch_dist"]
    model = stack_of(case, group)

    def run(*patches: Any) -> FakeCuda:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            return _run(model, group, SCHEDULES["mlp_shared_overlap"], rows_of(case, rank))

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
