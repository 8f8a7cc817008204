"""Every transport x every named schedule x 1 to 3 lanes x 1 to 3 chunks, as if on a GPU.

Whatever traits and schedule allow has no race between streams, frees nothing too early, and gives what the plain call
gives. The rest is refused by name before anything is launched, and the ranks go on. Real transports, kernel and experts
run in real lanes; gloo carries the bytes, `fake_cuda` checks the order in which streams would have run them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest import mock

import deep_ep_standin
import pytest
import torch
import torch._dynamo  # the fake device's modes import it, for seconds: once, before ranks are forked
from deep_ep_standin_events import calls
from deepep_cases import ROOM, TOLERANCE
from deepep_device import deepep_device
from moe_layers import make_layer
from torch import Tensor, nn

from moe import EmulatedLink, FusedMoEModularKernel, SoftmaxTopKRouter, make_all2all
from moe.all2all import registry
from moe.all2all.deepep import base as deepep
from moe.all2all.deepep.auto import DeepEPAutoAll2All
from moe.experts.base import SignallingExperts
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
    UBatchConfig,
    UBatchWrapper,
    set_forward_context,
)
from ubatch.streams import streams

EXPERTS, TOP_K = 8, 2


@dataclass(frozen=True)
class Case:
    """A transport on so many ranks.

    Attributes:
        name: of the back end.
        options: its own.
        ranks: gloo ranks, or 1.
        experts: back end of the experts.
        mode: of the steps.
        captured: DeepEP launches as it does while a graph is captured.
        named: schedules; where they are not all, another case of the back end has all.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    experts: str = "grouped"
    mode: ForwardMode = ForwardMode.PREFILL
    captured: bool = False
    named: tuple[str, ...] = tuple(SCHEDULES)

    @property
    def deepep(self) -> bool:
        """Whether DeepEP is in it, which needs rows of its own sizes in bfloat16."""
        return "deepep" in f"{self.name} {self.options.get('inner')}"

    @property
    def tolerance(self) -> float:
        """Of a token's row, relative. A last bit more in bfloat16 can be the next step of fp8 in the second layer."""
        return 6e-2 if "use_fp8" in self.options else TOLERANCE if self.deepep else 1e-5


SOME = ("mlp_shared_overlap", "two_batch_decode")
WITHOUT_COUNTS = {"use_fp8": True, "worst_case": True}
LINK = EmulatedLink(1e-5, 1e9)
CASES = {
    "local": Case("local", ranks=1),
    "host_loopback": Case("host_loopback", {"bytes_factor": 1.5}, ranks=1),
    "host_loopback_batched": Case("host_loopback_batched", ranks=1),
    "host_loopback_batched, signalling experts": Case(
        "host_loopback_batched", ranks=1, experts="triton_batched", named=("single_batch_signalled",)
    ),
    "torch_dist": Case("torch_dist"),
    "allgather_reducescatter": Case("allgather_reducescatter"),
    "emulated_link": Case("emulated_link", {"link": LINK}),
    "emulated_link over DeepEP": Case("emulated_link", {"link": LINK, "inner": "deepep_high_throughput"}, named=SOME),
    "deepep_high_throughput": Case("deepep_high_throughput"),
    "deepep_high_throughput, fp8 without counts": Case("deepep_high_throughput", WITHOUT_COUNTS, named=SOME),
    "deepep_high_throughput, captured": Case("deepep_high_throughput", captured=True, named=SOME),
    "deepep_low_latency": Case("deepep_low_latency", {"max_tokens_per_rank": ROOM}),
    "deepep_low_latency, one buffer": Case(
        "deepep_low_latency", {"max_tokens_per_rank": ROOM, "share_buffer": True}, named=SOME
    ),
    "deepep_auto, prefill": Case("deepep_auto", {"max_tokens_per_rank": ROOM}),
    "deepep_auto, decode": Case("deepep_auto", {"max_tokens_per_rank": ROOM}, mode=ForwardMode.DECODE),
    "deepep_v2": Case("deepep_v2", {"max_tokens_per_rank": ROOM}),
    "deepep_v2, fp8 without counts": Case("deepep_v2", {"max_tokens_per_rank": ROOM, **WITHOUT_COUNTS}, named=SOME),
    "deepep_v2, captured": Case("deepep_v2", {"max_tokens_per_rank": ROOM}, captured=True, named=SOME),
}


QUICK = ("local", "deepep_low_latency, one buffer")


def schedules(named: Sequence[str] = tuple(SCHEDULES)) -> Iterator[Schedule]:
    """Named ones in every size, once where two are the same; and the first with one dispatch, or received by peers."""
    first = SCHEDULES[named[0]]
    variants = [
        replace(first, name="received by the peer", recv=Recv.PEER),
        replace(first, name="one dispatch for all chunks", chunk_dispatch=False),
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


class Stack(nn.Module):
    """Residual MoE layers with a shared expert, of which nothing is held longer than needed."""

    def __init__(self, case: Case, group: CommGroup | None) -> None:
        super().__init__()
        hidden, dtype = (2048, torch.bfloat16) if case.deepep else (12, torch.float32)
        self.all2all = all2all = make_all2all(case.name, group=group, num_experts=EXPERTS, **case.options)
        torch.manual_seed(0)
        self.shared = nn.Linear(hidden, hidden, dtype=dtype)
        layers = [make_layer(EXPERTS, hidden, 4, seed=seed, dtype=dtype) for seed in (0, 1)]
        self.kernels = nn.ModuleList(layer.kernel(all2all, case.experts, self.shared) for layer in layers)
        self.router = SoftmaxTopKRouter(TOP_K)

    def forward(self, x: Tensor) -> Tensor:
        for kernel in self.kernels:
            weights, ids = self.router(x[:, :EXPERTS].float())
            x = x + kernel(x, weights, ids)
        return x

    def rows(self, case: Case, rank: int) -> Tensor:
        """Enough where chunks signal: of one without rows, whose kernel sets nothing, the device would see no write."""
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(
            48 if case.experts == "triton_batched" else 7 + 4 * rank, self.shared.in_features, generator=generator
        ).to(self.shared.weight.dtype)


def test_what_is_tried() -> None:
    sizes = {(lanes, chunks) for lanes in (1, 2, 3) for chunks in (1, 2, 3)}
    tried = {_same_as(schedule) for schedule in schedules()}
    for schedule in SCHEDULES.values():
        assert {_same_as(replace(schedule, lanes=lanes, chunks=chunks)) for lanes, chunks in sizes} <= tried
    known = {name for name, target in registry._BACKENDS._targets.items() if target.startswith("moe.")}  # not tests'
    assert {case.name for case in CASES.values()} == known
    assert {case.name for case in CASES.values() if case.named == tuple(SCHEDULES)} == known


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
    run_ranks(_check, CASES[name].ranks, name, lanes)


def _check(rank: int, ranks: int, name: str, lanes: int) -> None:
    case = CASES[name]
    with torch.inference_mode(), deep_ep_standin.installed():
        deep_ep_standin.Buffer.shared_by_lanes = "share_buffer" in case.options
        group = CommGroup.from_process_group(timeout_s=20.0) if ranks > 1 else None
        model = Stack(case, group)
        x = model.rows(case, rank)
        expected = model(x)
        ran = 0
        for schedule in schedules(case.named):
            if schedule.lanes != lanes:
                continue
            what = f"{name}: {schedule.name}, {schedule.lanes} lanes x {schedule.chunks} chunks"
            why = refusal(schedule, cast(FusedMoEModularKernel, model.kernels[0]), case.mode)
            with set_forward_context(ForwardContext(mode=case.mode, num_tokens=x.shape[0])):
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
    with deepep_device() as cuda, _in_lanes(model, group, schedule) as wrapper:
        with captured, mock.patch.object(streams, "CudaStreams", return_value=cuda):  # of a step outside lanes
            result = wrapper(x) * 1
        statistics = wrapper.statistics()
    assert statistics.engaged == (schedule.lanes > 1), f"{what}: {statistics}"
    assert statistics.engaged_single == schedule.single_batch, f"{what}: {statistics}"
    error = (result - expected).float().norm(dim=1) / expected.float().norm(dim=1)
    assert (error < case.tolerance).all(), f"{what}: tokens are wrong by {error.tolist()}"
    cuda.check(what)


def _check_refused(model: Stack, group: CommGroup | None, schedule: Schedule, x: Tensor, why: str, what: str) -> None:
    follows_the_vote = isinstance(model.all2all, DeepEPAutoAll2All)
    calls.clear()
    with (
        deepep_device() as cuda,
        _in_lanes(model, group if follows_the_vote else None, schedule) as wrapper,
        pytest.raises((ConfigError, PeerFailed), match=why),  # a peer may have been refused before this rank began
    ):
        wrapper(x)
    assert not calls, f"{what}: {calls}"
    assert not any(cuda.counts[stream] for stream in ("comm", "nccl")), f"{what}: {cuda.counts}"
    if follows_the_vote and group is not None:
        group.reset()  # as after any step that fails


@contextmanager
def _in_lanes(model: Stack, group: CommGroup | None, schedule: Schedule) -> Iterator[UBatchWrapper]:
    config = UBatchConfig(
        verify="off",
        group=group,
        schedule=schedule,
        num_ubatches=max(schedule.lanes, 2),
        dbo_prefill_token_threshold=3,
        dbo_decode_token_threshold=3,
        timeout_s=20.0,
    )
    with closing(UBatchWrapper(model, config)) as wrapper:
        yield wrapper
