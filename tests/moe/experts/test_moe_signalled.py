"""Signalled combines in the MoE layer: right, at the same points as others, during the projection, never half a batch.

Interpreted kernels run one after the other; that they could have run at once is shown by the order of streams (the fake
device), that they did in `test_moe_signalled_gpu`.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import FakeCuda
from graph_cases import graphed
from moe_layers import make_layer, make_tokens
from signalled_cases import EXPERTS, LAYERS, ONE, SCHEDULES, SPLIT, TOP_K, Model, inputs, overlapped, plain
from torch import Tensor, nn

from moe import FusedMoEModularKernel, make_all2all, make_experts
from ubatch import ConfigError, Recv, Schedule, Transfer, tracing
from ubatch.lanes.workers import SingleLane
from ubatch.streams.lane_streams import LaneStreams

pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")

from moe.all2all.host_loopback_batched import HostLoopbackBatchedAll2All
from moe.experts import triton_batched
from moe.experts.triton_batched import TritonBatchedExperts
from moe.kernels import signals as signals_module
from moe.kernels.signals import Alarm, SignalTimeout

pytestmark = pytest.mark.triton
NAMES = {"argvalues": SCHEDULES, "ids": [schedule.name for schedule in SCHEDULES]}
CPU = torch.device("cpu")


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def counted(wrapper: Any) -> tuple[int, int]:
    statistics = wrapper.statistics()
    return statistics.engaged, statistics.engaged_single


def in_one_lane(module: nn.Module, *given: Tensor, schedule: Schedule = ONE) -> Tensor:
    with closing(SingleLane(CPU)) as lane, torch.inference_mode():
        (output,) = lane.run([lambda: module(*given)], schedule, [None])
    return output


# --------------------------------------------------------------------------------------------------------------- right


@pytest.mark.sample(8)
@pytest.mark.parametrize("schedule", **NAMES)
def test_outputs_are_those_of_the_plain_loop(schedule: Schedule) -> None:
    with overlapped(Model(), schedule) as wrapper:
        for tokens, padded in ((90, 3), (7, 0), (90, 88)):
            given = inputs(tokens, padded)
            close(wrapper(*given), plain(*given))
        assert counted(wrapper) == ((0, 3) if schedule.lanes == 1 else (3, 0))


# -------------------------------------------------------------------------------------------------------------- points


def traced(schedule: Schedule) -> tuple[list[tuple[int, str]], list[tuple[int, str, str]]]:
    """The points and events of a step; also of a schedule in which nothing overlaps."""
    model, given = Model(), inputs(12, 0)
    with tracing() as trace:
        if schedule.lanes == 1:
            in_one_lane(model, *given, schedule=schedule)
        else:
            with overlapped(model, schedule) as wrapper:
                wrapper(*given)
    return trace.order, [(event.lane, event.kind, event.name) for event in trace.events]


@pytest.mark.wide
@pytest.mark.sample(12)
@pytest.mark.parametrize("recv", list(Recv))
@pytest.mark.parametrize("schedule", **NAMES)
def test_a_trace_shows_what_it_shows_of_others(schedule: Schedule, recv: Recv) -> None:
    schedule = replace(schedule, recv=recv if schedule.lanes > 1 else Recv.OWNER)
    order, events = traced(schedule)
    assert (order, events) == traced(replace(schedule, signalled=False))
    launches = sum(kind == "launch" and name.startswith("combine") for _, kind, name in events)
    assert launches == LAYERS * schedule.lanes * schedule.chunks


# ------------------------------------------------------------------------------------------------------------- refusals


def test_who_cannot_signal_is_refused_before_anything_is_launched() -> None:
    layer = make_layer(4, 256, 128)
    routed = make_tokens(layer, 6)
    arguments = routed.x, routed.weights, routed.ids
    batched = make_all2all("host_loopback_batched", group=None, num_experts=4)
    loopback, link = (make_all2all(name, group=None, num_experts=4) for name in ("host_loopback", "local"))
    fp8 = FusedMoEModularKernel(batched, make_experts("triton_batched", layer.w13, layer.w2, quantize="fp8"))
    for kernel, why in (
        (layer.kernel(loopback), "HostLoopbackAll2All cannot do: .* 'single_batch', or .* or 'host_loopback_batched'"),
        (layer.kernel(link), "LocalAll2All cannot do"),
        (layer.kernel(batched), r"GroupedExperts do not say what is done .* Use experts 'triton_batched'"),
        (fp8, "in fp8 have no down projection that signals. Use weights in bfloat16"),
    ):
        with tracing() as trace, pytest.raises(ConfigError, match=why):
            in_one_lane(kernel, *arguments)
        assert not [event for event in trace.events if event.kind == "launch"]
    kernel = layer.kernel(batched, "triton_batched")
    with pytest.raises(ConfigError, match=r"has no SMs of its own: .* Set comm_sms, such as 16"):
        kernel._check_signals(replace(ONE, comm_sms=0), torch.device("cuda"))
    kernel._check_signals(ONE, torch.device("cuda"))
    kernel._check_signals(replace(ONE, comm_sms=0), CPU)


# ----------------------------------------------------------------------------------------------------- order of streams


def on_fake_device(schedule: Schedule, *patches: Any) -> FakeCuda:
    """Two steps, with the caller at work meanwhile."""
    given = inputs(30)
    model, expected = Model(), plain(*given)
    with FakeCuda().installed() as cuda, overlapped(model, schedule) as wrapper:
        for patch in patches:
            patch.start()
        try:
            for _ in range(2):
                result = wrapper(*given) * 1
        finally:
            for patch in patches:
                patch.stop()
        budget = wrapper.statistics().sm_budget
    close(result, expected)
    assert budget == {"host_loopback_batched": True, "triton experts": True}
    return cuda


@pytest.mark.wide
@pytest.mark.sample(8)
@pytest.mark.parametrize("schedule", **NAMES)
def test_streams_alone_order_all_but_the_signals(schedule: Schedule) -> None:
    cuda = on_fake_device(replace(schedule, comm_sms=16))
    cuda.check(schedule.name)
    assert not cuda.syncs, "the host waited"
    assert cuda.signalled == [True] * (2 * 2 * schedule.lanes * schedule.chunks), "a copy came after its projection"


def test_the_sms_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: dict[str, set[int]] = {"copy": set(), "down": set()}
    copy, down = signals_module.copy_signalled, triton_batched.project_down_signalling

    def copying(y: Tensor, counts: Tensor, signals: Any, out: Tensor, num: int, *more: Any) -> None:
        programs["copy"].add(num)
        copy(y, counts, signals, out, num, *more)

    def projecting(x: Tensor, w2: Tensor, counts: Tensor, signals: Any, num: int) -> Tensor:
        programs["down"].add(num)
        return down(x, w2, counts, signals, num)

    monkeypatch.setattr(signals_module, "copy_signalled", copying)
    monkeypatch.setattr(triton_batched, "project_down_signalling", projecting)
    on_fake_device(replace(ONE, comm_sms=20))
    assert programs == {"copy": {20}, "down": {132 - 20}}


@pytest.mark.slow
def test_a_fork_after_the_projection_would_be_found() -> None:
    def late(self: LaneStreams, *, fork: Any = None, **settings: Any) -> None:
        enter(self, **settings)  # after what compute has so far

    enter = LaneStreams.enter_comm
    cuda = on_fake_device(ONE, mock.patch.object(LaneStreams, "enter_comm", late))
    cuda.check()
    assert cuda.signalled == [False] * 4


@pytest.mark.wide
def test_no_fork_would_be_found() -> None:
    """The copy would look at signals, and read how many rows there are, before they are what they should be."""

    def none(self: LaneStreams, *, fork: Any = None, **settings: Any) -> None:
        if fork is None:
            enter(self, **settings)
        else:
            self._streams.set_current(self.comm_stream)
            self.on_comm = True

    enter = LaneStreams.enter_comm
    cuda = on_fake_device(ONE, mock.patch.object(LaneStreams, "enter_comm", none))
    assert any("_copy_signalled_kernel on comm reads" in race for race in cuda.races), cuda.races[:3]


@pytest.mark.slow
def test_no_join_would_be_found() -> None:
    cuda = on_fake_device(ONE, mock.patch.object(LaneStreams, "join_comm"))
    assert any("reads" in race and "after 0: copy_ on comm" in race for race in cuda.races), cuda.races[:3]
    assert any("zero_ on compute writes" in race and "_copy_signalled" in race for race in cuda.races), cuda.races


@pytest.mark.slow
def test_what_nobody_keeps_would_be_found() -> None:
    """In two lanes, as the interpreter holds on to what its last kernel was given."""
    make_transfer = Transfer.__init__
    keeps_nothing = mock.patch.object(
        Transfer, "__init__", lambda self, *args, **kwargs: make_transfer(self, *args, **{**kwargs, "keep": ()})
    )
    cuda = on_fake_device(SCHEDULES[3], keeps_nothing)
    assert any("_copy_signalled_kernel" in each and "freed too early" in each for each in cuda.lifetimes)


# -------------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.slow
@pytest.mark.parametrize("schedule", **NAMES)
def test_replays(schedule: Schedule) -> None:
    model = Model()
    with graphed(model, schedule=schedule, **SPLIT) as case:
        tokens = 70 if schedule is ONE else 12
        case.wrapper.capture(*inputs(tokens))
        for padded in (0, 5, tokens):
            given = inputs(tokens, padded)
            close(case.wrapper(*given), plain(*given))
        statistics = case.wrapper.statistics()
        assert statistics.graph_replays == 3, statistics
        assert counted(case.wrapper) == ((0, 3) if schedule.lanes == 1 else (3, 0))


def test_a_capture_makes_no_memory() -> None:
    model = Model()
    capturing = mock.patch("moe.all2all.host_loopback.capturing", return_value=True)
    with (
        overlapped(model, ONE) as wrapper,
        capturing,
        pytest.raises(ConfigError, match=r"has pinned memory for 0 bytes, not for a message of \d+, and cannot"),
    ):
        wrapper(*inputs(8))
    kernel, routed = model.kernels[0], torch.randn(8, 32)
    transport: HostLoopbackBatchedAll2All = model.all2all
    ids = torch.zeros(8, 1, dtype=torch.int64)
    arrived = transport.dispatch(routed, ids, torch.ones(8, 1)).wait()
    transport.combine(kernel.experts.run_batched(arrived.hidden_states, arrived.rows_per_expert), arrived.handle).wait()
    with (
        capturing,
        pytest.raises(ConfigError, match=r"has signals for 0 bytes, not for a message of \d+, and cannot make more"),
    ):
        transport.open_combine(arrived.handle)
    assert transport._alarm is None


# --------------------------------------------------------------------------------------------------- never half a batch


def impatient() -> Any:
    make = signals_module.make_signals
    return mock.patch.object(
        signals_module, "make_signals", lambda *args, **more: replace(make(*args, **more), patience=5)
    )


def unfinished(times: int) -> Any:
    """The first `times` projections never say that the first block is done."""
    left = [times]

    def project(self: TritonBatchedExperts, rows: Tensor, counts: Tensor, signals: Any) -> Tensor:
        y = run(self, rows, counts, signals)
        left[0] -= 1
        if left[0] >= 0:
            signals.counts[counts.nonzero()[0] * (signals.counts.numel() // len(counts))] = 1 - signals.threshold
        return y

    run = TritonBatchedExperts.project_down_signalling
    return mock.patch.object(TritonBatchedExperts, "project_down_signalling", project)


@pytest.mark.sample(8)
@pytest.mark.parametrize("schedule", **NAMES)
def test_a_copy_that_gives_up_spoils_its_step_and_is_told(schedule: Schedule) -> None:
    given = inputs(20, 0)
    model = Model()
    expected = plain(*given)
    model.kernels = model.kernels[1:]  # one layer, so that nothing is launched after it in the same step
    with overlapped(model, schedule) as wrapper:
        whole = wrapper(*given)
        with impatient(), unfinished(1), mock.patch.object(Alarm, "rung", return_value=False):  # the host is ahead
            output = wrapper(*given)
        spoilt = output.isnan().all(dim=1)
        assert spoilt[: 20 // schedule.lanes].all(), "every token of the lane, whatever its experts"
        with pytest.raises(SignalTimeout, match=r"looked 5 .*times for a block of 64 rows .* leave it SMs"):
            wrapper(*given)
        assert torch.equal(wrapper(*given), whole), "what was left over is cleared"
        with impatient(), unfinished(1), mock.patch.object(Alarm, "rung", return_value=False):
            wrapper(*given)
        with pytest.raises(SignalTimeout):
            model.all2all.check()
        model.all2all.check()
        assert torch.equal(wrapper(*given), whole)
        replayed = torch.ones(8, dtype=torch.uint8)  # as if a graph had signalled there, and its copy had given up
        next(iter(model.all2all._slots.values())).memory.outgrown = (replayed,)
        for flag in (model.all2all._alarm.gave_up, model.all2all._alarm.told):
            flag.fill_(1)
        with pytest.raises(SignalTimeout):
            model.all2all.check()
        assert not replayed.any()
    assert expected.isfinite().all()


def test_within_a_step_the_next_layer_is_told() -> None:
    with overlapped(Model(), ONE) as wrapper, impatient(), unfinished(1), pytest.raises(SignalTimeout):
        wrapper(*inputs(20))


def test_a_combine_is_told_too() -> None:
    layer = make_layer(EXPERTS, 32, 20)
    transport = HostLoopbackBatchedAll2All(num_experts=EXPERTS)
    kernel, routed = layer.kernel(transport, "triton_batched"), make_tokens(layer, 9, TOP_K)
    sent = transport.dispatch(routed.x, routed.ids, routed.weights).wait()
    with impatient(), unfinished(1):
        assert in_one_lane(kernel, routed.x, routed.weights, routed.ids).isnan().all()
    for call in (
        lambda: transport.open_combine(sent.handle),
        lambda: transport.combine(sent.hidden_states, sent.handle),
    ):
        transport._alarm.told.fill_(1)
        transport._alarm.gave_up.fill_(1)
        with pytest.raises(SignalTimeout):
            call()


def test_a_lane_that_failed_in_between_leaves_no_signals() -> None:
    """Signalled, and never sent: the next copy must not take them for its own."""
    run = TritonBatchedExperts.project_down_signalling
    seen: list[bool] = []

    def failing(self: TritonBatchedExperts, rows: Tensor, counts: Tensor, signals: Any) -> Tensor:
        run(self, rows, counts, signals)
        assert signals.counts.any()
        raise ValueError("in between")

    def looking(self: TritonBatchedExperts, rows: Tensor, counts: Tensor, signals: Any) -> Tensor:
        seen.append(bool(signals.counts.any()))
        return run(self, rows, counts, signals)

    given = inputs(20)
    with overlapped(Model(), ONE) as wrapper:
        with (
            mock.patch.object(TritonBatchedExperts, "project_down_signalling", failing),
            pytest.raises(ValueError, match="in between"),
        ):
            wrapper(*given)
        with mock.patch.object(TritonBatchedExperts, "project_down_signalling", looking):
            close(wrapper(*given), plain(*given))
    assert seen == [False, False]
