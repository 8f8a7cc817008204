"""A batch as the only lane, in the caller's thread: which features of a lane it has."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from lanes import FinishedWork

import ubatch
from ubatch import ConfigError, Recv, Schedule, dbo_register_recv_hook, dbo_yield, get_schedule, report_sm_use
from ubatch.lanes.context import current_lane
from ubatch.lanes.workers import SingleLane

CPU = torch.device("cpu")
SINGLE = get_schedule("single_batch")


@pytest.fixture
def lane() -> Iterator[SingleLane]:
    single = SingleLane(CPU)
    yield single
    single.close()


def test_it_is_lane_0_of_1_in_this_thread(lane: SingleLane) -> None:
    def body() -> tuple[Any, ...]:
        return (
            threading.get_ident(),
            ubatch.dbo_current_ubatch_id(),
            ubatch.current_schedule(),
            ubatch.get_forward_context(),
        )

    context = ubatch.ForwardContext(num_tokens=7)
    with ubatch.set_forward_context(ubatch.ForwardContext(num_tokens=3)):
        assert lane.run([body], SINGLE, [context]) == [(threading.get_ident(), 0, SINGLE, context)]
        outside = ubatch.get_forward_context()
    assert outside.num_tokens == 3
    assert current_lane() is None
    assert ubatch.current_schedule().name == "serial"
    assert (lane.counts.steps, lane.counts.threads_started, lane.counts.handoffs) == (1, 0, 0)


@pytest.mark.parametrize("recv", list(Recv))
def test_points_hand_on_to_nobody_and_run_hooks(lane: SingleLane, recv: Recv) -> None:
    log: list[str] = []

    def body() -> None:
        dbo_register_recv_hook(lambda: log.append("received"))
        log.append("beside")
        dbo_yield("dispatch")
        log.append("after")
        dbo_register_recv_hook(lambda: log.append("received at the end"))

    with ubatch.tracing() as trace:
        for _ in range(2):
            lane.run([body], Schedule("one", lanes=1, chunks=2, recv=recv), [None])
    assert log == ["beside", "received", "after", "received at the end"] * 2
    assert trace.order == [(0, "dispatch"), (0, "end")] * 2


def test_a_failure_is_the_callers_and_the_next_step_runs(lane: SingleLane) -> None:
    def fails() -> None:
        dbo_register_recv_hook(lambda: None)
        dbo_yield("select")
        raise ValueError("no such expert")

    with pytest.raises(ValueError, match="no such expert") as caught:
        lane.run([fails], SINGLE, [None])
    assert caught.value.__notes__ == ["raised in lane 0 of 1, last point 'select', 1 points passed"]
    assert lane.failure == (0, "select")
    assert current_lane() is None
    assert lane.run([lambda: 5], SINGLE, [None]) == [5]
    assert lane.failure is None


def test_it_does_not_run_inside_a_lane_nor_for_several(lane: SingleLane) -> None:
    with pytest.raises(ubatch.UBatchError, match="entered from inside lane 0"):
        lane.run([lambda: SingleLane(CPU).run([int], SINGLE, [None])], SINGLE, [None])
    with pytest.raises(ConfigError, match="one lane runs one batch"):
        lane.run([int, int], SINGLE, [None, None])
    with pytest.raises(ConfigError, match="'mlp_shared_overlap' for 2"):
        lane.run([int], get_schedule("mlp_shared_overlap"), [None])


def test_transfers_have_the_communication_stream() -> None:
    """They are launched there, and joined where they are waited for, or at the end where nobody does."""
    cuda = FakeCuda()
    lane = SingleLane(CPU, cuda)
    x, kept = torch.ones(4), []

    def body(wait: bool) -> Any:
        y = torch.empty_like(x)
        with ubatch.on_comm_stream():
            y.copy_(x)
        transfer = ubatch.Transfer("copy", (FinishedWork(),), lambda: y, stream_ordered=True, keep=(y,))
        if wait:
            return transfer.wait() * 2
        kept.append(y)
        return x * 2

    with cuda.installed():
        for wait in (True, False, True):
            (result,) = lane.run([lambda wait=wait: body(wait)], SINGLE, [None])
            result.add_(1)
        kept[0].add_(1)  # joined at the end of its step
    cuda.check()
    assert cuda.counts["comm"] == 3
    made = cuda.events
    with cuda.installed():
        lane.run([lambda: body(True)], SINGLE, [None])
    assert cuda.events == made, "events are kept from step to step"


def test_a_batch_has_an_sm_budget_too() -> None:
    lane = SingleLane(CPU, FakeCuda(sms=132))

    def body() -> tuple[int, int]:
        budget = ubatch.current_sm_budget()
        report_sm_use("gemm", obeys=True)
        report_sm_use("combine", obeys=False)
        return budget.comm, budget.compute

    assert lane.run([body], Schedule("one", lanes=1, chunks=2, comm_sms=20), [None]) == [(20, 112)]
    assert lane.counts.sm_users == {"gemm": True, "combine": False}
