"""Graphs: a replay equals the eager call bit for bit, wakes no thread, takes no memory; other calls run eagerly."""

import itertools
import logging
import threading
from typing import Any

import pytest
import torch
from graph_cases import (
    HAS_PROC,
    WIDTH,
    Net,
    Planned,
    PlannedNet,
    graphed,
    lane_switches,
    memory,
    planned_context,
    settled,
)
from torch import Tensor, nn

import ubatch
from ubatch import ForwardContext, ForwardMode, GraphKey, GraphMiss, set_forward_context

pytestmark = pytest.mark.long

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PREFILL = ForwardMode.PREFILL


def misses(wrapper: Any) -> dict[GraphMiss, int]:
    return dict(wrapper.statistics().graph_misses_by_reason)


# ------------------------------------------------------------------------------------------------------------- replay


@pytest.mark.sample(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "two_batch_decode", "two_batch_prefill"])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_a_replay_is_the_eager_call(lanes: int, schedule: str, device: str) -> None:
    settings: dict[str, Any] = {"enable_dbo": False} if lanes == 1 else {"num_ubatches": lanes}
    with graphed(device=device, schedule=schedule, **settings) as case:
        captured = case.wrapper.capture(case.x(6), residual=case.x(6))
        tokens, name = ((6,), "plain") if lanes == 1 else ((6 // lanes,) * lanes, schedule)
        key = captured.key
        assert (key, key.overlapped, key.num_tokens) == (GraphKey(tokens, name, PREFILL), lanes > 1, 6)
        assert captured.nbytes > 0
        assert captured.seconds > 0
        assert dict(case.wrapper.graphs) == {captured.key: captured}
        for _ in range(4):
            x, residual = case.x(6), case.x(6)
            assert torch.equal(case.wrapper(x, residual=residual), case.eager(x, residual=residual))
        seen = case.wrapper.statistics()
        assert (seen.graph_replays, seen.graph_misses) == (4, 0)
        assert (seen.calls, seen.engaged, sum(seen.declined.values())) == (4, 4 * (lanes > 1), 4 * (lanes == 1))


def test_a_capture_runs_nothing_but_the_warm_up() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor, residual: Tensor | None = None, double: bool = False) -> Tensor:
            self.count += 1
            return super().forward(x, residual, double)

    with graphed(Counting(), num_ubatches=2) as case:
        case.wrapper.capture(case.x(4))
        assert case.wrapper.count.item() == 2 * 2, "two rehearsals of two lanes"
        case.wrapper(case.x(4))
        assert case.wrapper.count.item() == 2 * 2 + 2, "a replay does what was captured"


@pytest.mark.skipif(not HAS_PROC, reason="counts the threads' context switches in /proc")
@pytest.mark.parametrize("device", DEVICES)
def test_no_thread_runs_during_a_replay(device: str) -> None:
    with graphed(device=device, num_ubatches=3) as case:
        case.wrapper.capture(case.x(6))
        x = case.x(6)
        case.eager.close()
        before, slept = case.wrapper.statistics(), settled(lane_switches)
        assert len(slept) == 3
        for _ in range(50):
            case.wrapper(x)
        after = case.wrapper.statistics()
        assert after.graph_replays == before.graph_replays + 50
        assert after.handoffs == before.handoffs
        assert after.lane_threads_started == before.lane_threads_started
        assert lane_switches() == slept, "a lane's thread woke up"
        if case.fake is not None:
            assert case.fake.replay_threads == {threading.get_ident()}
            assert case.fake.turns == case.fake.replays == 50


def test_lane_switches_would_notice_a_thread_that_runs() -> None:
    with graphed(num_ubatches=2) as case:
        case.eager(case.x(4))
        before = settled(lane_switches)
        case.eager(case.x(4))
        assert all(after > before[name] for name, after in settled(lane_switches).items())


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_of_two_sizes_and_both_kinds_interleave_in_one_pool(device: str) -> None:
    with graphed(device=device, num_ubatches=2, dbo_prefill_token_threshold=6) as case:
        for rows in (8, 6, 4, 2):
            case.wrapper.capture(case.x(rows))
        kinds = {key.num_tokens: key.overlapped for key in case.wrapper.graphs}
        assert kinds == {8: True, 6: True, 4: False, 2: False}
        kept: list[tuple[Tensor, Tensor]] = []
        for rows in itertools.islice(itertools.cycle([8, 2, 6, 4, 4, 8]), 24):
            x = case.x(rows)
            kept.append((case.wrapper(x), case.eager(x)))
        assert all(torch.equal(result, expected) for result, expected in kept), "an output outlives later replays"
        assert case.wrapper.statistics().graph_replays == 24


@pytest.mark.wide
@pytest.mark.parametrize("device", DEVICES)
def test_a_thousand_replays_with_changing_metadata_take_no_memory(device: str) -> None:
    plans = [Planned(3, device), Planned(3, device)]
    context = planned_context(*plans, rows=6)
    with graphed(PlannedNet(layers=1), device=device, num_ubatches=2) as case:
        with set_forward_context(context):
            case.wrapper.capture(case.x(6))
            case.wrapper(case.x(6))
            case.eager(case.x(6))
            before = memory(device)
            for step in range(1000):
                x = case.x(6)
                for lane, plan in enumerate(plans):
                    plan.replan(step / 7 + lane)
                result = case.wrapper(x)
                if step % 100 == 99:
                    assert torch.equal(result, case.eager(x))
            del x, result
            assert memory(device) <= before
        assert (case.wrapper.statistics().graph_replays, misses(case.wrapper)) == (1001, {})


def test_static_inputs_are_shared_by_all_sizes() -> None:
    with graphed(num_ubatches=2) as case:
        for rows in (32, 16, 8, 4):
            case.wrapper.capture(case.x(rows), residual=case.x(rows))
        buffers = case.wrapper._ubatch_wrapped.table.buffers._flat.values()
        assert sum(flat.nbytes for flat in buffers) == 2 * 32 * WIDTH * 4


def test_the_layout_of_an_argument_is_kept() -> None:
    seen: list[tuple[int, ...]] = []

    class Strided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.stride())
            return x * 1

    with graphed(Strided(), enable_dbo=False) as case:
        case.wrapper.capture(case.x(8, 4).t())
        x = case.x(8, 4).t()
        assert torch.equal(case.wrapper(x), x)
        assert torch.equal(case.wrapper(x.contiguous()), x), "what differs only in layout is copied in"
        assert set(seen) == {(1, 4)}


# ------------------------------------------------------------------------------------------------------ forward context


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_is_captured_under_a_forward_context_with_lanes(device: str) -> None:
    lanes, whole = [Planned(2, device) for _ in range(3)], Planned(6, device)
    overlapped, plain = planned_context(*lanes, rows=6), planned_context(whole, rows=6)
    with graphed(PlannedNet(), device=device, num_ubatches=3) as case:
        for context in (overlapped, plain):
            with set_forward_context(context):
                case.wrapper.capture(case.x(6))
        assert list(case.wrapper.graphs) == [
            GraphKey((2, 2, 2), "mlp_shared_overlap", ForwardMode.DECODE),
            GraphKey((6,), "plain", ForwardMode.DECODE),
        ]
        for step in range(6):
            for plan in (*lanes, whole):
                plan.replan(step)
            x = case.x(6)
            with set_forward_context(plain if step % 2 else overlapped):
                assert torch.equal(case.wrapper(x), case.eager(x))
        seen = case.wrapper.statistics()
        assert (seen.graph_replays, seen.graph_misses, seen.engaged) == (6, 0, 3)


def test_a_graph_never_runs_on_plans_that_it_does_not_read(caplog: pytest.LogCaptureFixture) -> None:
    mine = [Planned(2), Planned(2)]
    with graphed(PlannedNet(), num_ubatches=2) as case:
        with set_forward_context(planned_context(*mine, rows=4)):
            case.wrapper.capture(case.x(4))
        x = case.x(4)
        fresh = Planned(2)
        fresh.replan(3)
        for plans in ([mine[0], fresh], [Planned(4)], mine[::-1]):
            with set_forward_context(planned_context(*plans, rows=4)):
                assert torch.equal(case.wrapper(x), case.eager(x))
        assert misses(case.wrapper) == {GraphMiss.CONTEXT_DIFFERS: 2, GraphMiss.NO_GRAPH: 1}
        with set_forward_context(planned_context(*mine, rows=4)):
            case.wrapper(x)
        assert case.wrapper.statistics().graph_replays == 1
        assert sum("has other attention plans" in record.message for record in caplog.records) == 1


def test_a_mode_has_graphs_of_its_own() -> None:
    with graphed(num_ubatches=2) as case:
        with set_forward_context(ForwardContext(num_tokens=4, mode=ForwardMode.DECODE)):
            case.wrapper.capture(case.x(4))
        x = case.x(4)
        assert torch.equal(case.wrapper(x), case.eager(x))
        assert misses(case.wrapper) == {GraphMiss.NO_GRAPH: 1}
        with set_forward_context(ForwardContext(num_tokens=4, mode=ForwardMode.DECODE)):
            case.wrapper(x)
        assert case.wrapper.statistics().graph_replays == 1


# ------------------------------------------------------------------------------------------- what runs eagerly, and why


def test_what_is_frozen_in_a_graph_must_be_as_it_was() -> None:
    with graphed(num_ubatches=2) as case:
        wrapper, x, residual = case.wrapper, case.x(4), case.x(4)
        wrapper.capture(x, residual=residual, double=True)

        def missed(reason: GraphMiss, why: str, *args: Any, **kwargs: Any) -> None:
            before = misses(wrapper).get(reason, 0)
            assert torch.equal(wrapper(*args, **kwargs), case.eager(*args, **kwargs))
            assert misses(wrapper)[reason] == before + 1
            assert why in str(wrapper.statistics().last_graph_miss)

        assert torch.equal(wrapper(x, residual, True), case.eager(x, residual, True)), "positional or not is the same"
        assert wrapper.statistics().graph_replays == 1
        differ = GraphMiss.ARGUMENTS_DIFFER
        missed(differ, "argument 'double' is False, was captured as True", x, residual=residual, double=False)
        missed(differ, "argument 'double' is missing", x, residual=residual)
        missed(differ, "tensor argument 'residual' is missing", x, double=True)
        missed(differ, "argument 'residual' is torch.float64 [4, 8]", x, residual=residual.double(), double=True)
        missed(differ, "argument 'residual' is torch.float32 [4, 1]", x, residual=residual[:, :1], double=True)
        missed(GraphMiss.NO_GRAPH, "nothing was captured for 2 tokens, prefill", case.x(2), residual[:2], True)
        with torch.autocast("cpu", torch.bfloat16):
            missed(GraphMiss.STATE_DIFFERS, "autocast is (True, torch.bfloat16)", x, residual=residual, double=True)
        wrapper.train()
        missed(GraphMiss.STATE_DIFFERS, "the module is in training mode", x, residual=residual, double=True)
        wrapper.eval()
        wrapper(x, residual=residual, double=True)
        assert wrapper.statistics().graph_replays == 2, "back in eval mode the graph is as good as before"
    with graphed() as case:
        case.wrapper.capture(case.x(4))
        with torch.inference_mode(False), torch.enable_grad():
            result = case.wrapper(torch.randn(4, WIDTH))
            result.sum().backward()
        assert misses(case.wrapper) == {GraphMiss.GRADIENTS: 1}


def test_a_miss_is_said_once_and_not_at_all_where_nothing_was_captured(caplog: pytest.LogCaptureFixture) -> None:
    with graphed(num_ubatches=2) as case:
        for _ in range(3):
            case.wrapper(case.x(4))
        assert not caplog.records
        case.wrapper.capture(case.x(4))
        for _ in range(3):
            case.wrapper(case.x(6))
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "a call runs without its graph (no_graph)" in caplog.text
        assert case.wrapper.statistics().graph_misses == 6


# -------------------------------------------------------------------------------------------------------------- outputs


def test_outputs_are_copied_whatever_they_are_nested_in() -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            ubatch.dbo_yield()
            return {"y": (x + 1, [x * 2]), "same": x, "name": "nested", "none": None}

    with graphed(Nested(), num_ubatches=2) as case:
        case.wrapper.capture(case.x(4))
        x, other = case.x(4), case.x(4)
        result = case.wrapper(x)
        case.wrapper(other)
        assert torch.equal(result["y"][0], x + 1)
        assert torch.equal(result["y"][1][0], x * 2)
        assert torch.equal(result["same"], x)
        assert (result["name"], result["none"]) == ("nested", None)
        assert case.wrapper.statistics().graph_replays == 2


def test_a_replay_is_in_the_trace() -> None:
    with graphed(num_ubatches=2) as case:
        with ubatch.tracing() as trace:
            case.wrapper.capture(case.x(4))
            assert not trace.spans, "a rehearsal is no step"
            case.wrapper(case.x(4))
        assert [(span.name, span.lane) for span in trace.spans] == [("replay", -1)]
        assert not trace.order


# ------------------------------------------------------------------------------------------------------- graphs by hand


def test_a_graph_can_be_replayed_bare_captured_anew_and_dropped() -> None:
    with graphed(num_ubatches=2) as case:
        fake = case.fake
        first = case.wrapper.capture(case.x(4))
        first.replay()
        assert fake.replays == 1
        assert case.wrapper.statistics().graph_replays == 0, "that is not a call"
        second = case.wrapper.capture(case.x(4))
        assert dict(case.wrapper.graphs) == {second.key: second}
        assert fake.alive == 1, "the older one of the same key went"
        case.wrapper.drop_graphs()
        assert not case.wrapper.graphs
        assert fake.alive == 0
        assert not case.wrapper._ubatch_wrapped.table.buffers._flat
        x = case.x(4)
        assert torch.equal(case.wrapper(x), case.eager(x))
        case.wrapper.capture(x)
        assert torch.equal(case.wrapper(x), case.eager(x))
        assert case.wrapper.statistics().graph_replays == 1


def test_nothing_is_captured_without_full_mode() -> None:
    with graphed() as case:
        for capture in (case.eager.capture, case.eager.capture_sizes):
            with pytest.raises(ubatch.ConfigError, match="nothing is captured with cudagraph_mode NONE"):
                capture(case.x(4))
        assert case.eager.graphs == {}
        case.eager.drop_graphs()
        assert case.eager.statistics().graph_misses == 0


def test_a_key_and_a_graph_describe_themselves() -> None:
    key = GraphKey((3, 4), "mlp_shared_overlap", ForwardMode.DECODE)
    assert str(key) == "3+4 tokens, decode, mlp_shared_overlap"
    with graphed() as case:
        assert "recording" not in repr(case.wrapper.capture(case.x(4)))
        assert all(isinstance(graph, ubatch.CapturedGraph) for graph in case.wrapper.graphs.values())
