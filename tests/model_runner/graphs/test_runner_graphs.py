"""Steps as graphs: the same tokens as eager steps, while requests come and go. On a CPU, through the fake graphs.

Under a schedule per mode single-batch overlap is captured, too, and each mode has its own lanes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture
from fake_graphs import FakeGraphs
from runner_graph_cases import Job, StaticExperts, make_captured, make_checkpoint, make_load, make_runner, serve, start

from model_runner import ModelRunner, SamplingParams, ScheduledRequest, build_input_batch
from model_runner.step.graph_sizes import graph_families
from tests.support.shaped_steps import decided_step
from ubatch import CapturedGraph, ConfigError, Decision, ForwardMode, ModeSettings, UBatchConfig, UBatchError

pytestmark = pytest.mark.long


checkpoint = checkpoint_fixture(make_checkpoint)


@pytest.fixture(scope="module")
def eager(checkpoint: Path) -> Iterator[ModelRunner]:
    with make_runner(checkpoint) as runner:
        yield runner


@dataclass(frozen=True)
class Load:
    """A load with the tokens that it gives, and its decode steps' sizes."""

    jobs: list[Job]
    tokens: list[list[int]]
    sizes: list[int]


@pytest.fixture(scope="module")
def load(eager: ModelRunner) -> Load:
    """It visits every size, needs padding, and goes beyond the largest."""
    jobs = make_load(60, 250, 30)
    tokens, sizes = serve(eager, jobs)
    assert len(sizes) > 200
    assert {1, 2, 3, 4, 5, 6, 7, 8} <= set(sizes)
    return Load(jobs, tokens, sizes)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("lanes", "room"), [(0, 7), (2, 2 * 4), (3, 3 * 3)])
def test_tokens_are_those_of_eager_steps(checkpoint: Path, load: Load, lanes: int, room: int) -> None:
    with make_captured(checkpoint, lanes=lanes) as runner:
        captured = runner.statistics()
        assert serve(runner, load.jobs) == (load.tokens, load.sizes)
        statistics = runner.statistics()
    replays = sum(size <= room for size in load.sizes)
    assert replays > 150
    assert statistics.graph_replays == replays
    if lanes:  # the others are prefills, and decodes that are too large
        assert statistics.engaged >= sum(size >= max(4, lanes) for size in load.sizes)
    else:
        assert statistics.handoffs == captured.handoffs == 0


def test_lanes_of_a_replayed_step_are_those_of_the_vote(checkpoint: Path, load: Load) -> None:
    with make_captured(checkpoint, lanes=2) as runner:
        threads = runner.statistics().lane_threads_started
        requests = start(runner, [5] * 5)
        handoffs = runner.statistics().handoffs
        output = runner.execute([ScheduledRequest(request, 1) for request in requests])
        assert output.decision.engaged
        assert output.decision.tokens == ((2, 3),)
        assert output.decision.graph_mode
        statistics = runner.statistics()
        assert statistics.graph_replays == 1
        assert (statistics.handoffs, statistics.lane_threads_started) == (handoffs, threads)


def test_padding_visits_no_expert(checkpoint: Path) -> None:
    with make_captured(checkpoint, lanes=2) as runner:
        experts = [module for module in runner.model.modules() if isinstance(module, StaticExperts)]
        requests = start(runner, [4] * 5)
        for count, rows in ((5, 5), (3, 3), (1, 1)):
            before = sum(int(expert.visits) for expert in experts)
            runner.execute([ScheduledRequest(request, 1) for request in requests[:count]])
            assert sum(int(expert.visits) for expert in experts) - before == rows * len(experts)
        assert runner.statistics().graph_replays == 3


@pytest.mark.wide
def test_sequences_grow_to_the_longest_there_can_be(checkpoint: Path, eager: ModelRunner) -> None:
    jobs = [Job(0, [7] * 3, SamplingParams(max_tokens=125, ignore_eos=True)), Job(0, [8], SamplingParams(max_tokens=9))]
    with make_captured(checkpoint, cudagraph_capture_sizes=(2,)) as runner:
        assert serve(runner, jobs) == serve(eager, jobs)
        assert runner.statistics().graph_replays == 124


def test_hidden_states_are_the_eager_ones(checkpoint: Path, eager: ModelRunner) -> None:
    """Not only the tokens: every row, in the batch's order, whatever the padding."""
    hidden = []
    with make_captured(checkpoint, lanes=2) as graphs:
        for runner in (eager, graphs):
            requests = start(runner, [3, 9, 1, 6, 2])
            with torch.inference_mode():
                shares = [ScheduledRequest(request, 1) for request in requests]
                batch = build_input_batch(shares, runner.request_table, runner.kv_cache.spec)
                hidden.append(runner.run(runner.agree(batch)).clone())
            for request in requests:
                runner.release(request)
        assert graphs.statistics().graph_replays == 1
    torch.testing.assert_close(hidden[0], hidden[1], atol=1e-5, rtol=1e-5)
    assert hidden[0].shape[0] == 5


def test_a_step_beyond_the_largest_runs_eagerly_and_says_so_once(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_captured(checkpoint, cudagraph_capture_sizes=(2, 4)) as runner:
        requests = start(runner, [2] * 6)
        with caplog.at_level(logging.WARNING, logger="model_runner"):
            for _ in range(3):
                output = runner.execute([ScheduledRequest(request, 1) for request in requests])
                assert not output.decision.graph_mode
        (record,) = [record for record in caplog.records if record.name == "model_runner.graphs.steps"]
        assert "6 requests runs eagerly: the largest CUDA graph has room for 4" in record.getMessage()
        runner.execute([ScheduledRequest(request, 1) for request in requests[:4]])
        assert runner.statistics().graph_replays == 1


def test_a_plain_step_beyond_the_largest_plain_graph_says_so(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_captured(checkpoint, lanes=2, cudagraph_capture_sizes=(2, 7)) as runner:
        requests = start(runner, [2] * 8)
        with caplog.at_level(logging.WARNING, logger="model_runner"):
            output = runner.execute([ScheduledRequest(request, 1) for request in requests])
            assert output.decision.engaged
            assert output.decision.graph_mode, "two lanes of four have room"
            assert not caplog.records
            assert runner.graphs is not None
            declined = Decision(False, None, None, ((8,),), graph_mode=runner.graphs.families[0].fingerprint)
            assert runner.graphs.agree(decided_step(declined)).graph is None
        (record,) = caplog.records
        assert "8 requests runs eagerly: the largest CUDA graph without overlap has room for 7" in record.getMessage()


def test_what_is_captured_is_told_largest_first(checkpoint: Path) -> None:
    told: list[CapturedGraph] = []
    options: dict[str, Any] = {"cudagraph_mode": "full", "cudagraph_capture_sizes": (2, 5, 4), "graphs": FakeGraphs()}
    with make_runner(checkpoint, lanes=2, **options) as runner:
        shapes = [(shape.lanes, shape.num_tokens) for shape in runner.graph_shapes]
        assert shapes == [(2, 6), (1, 5), (1, 4), (2, 4), (1, 2)]
        assert not runner.statistics().graph_replays
        graphs = runner.capture_graphs(told.append)
        assert told == graphs
        assert [graph.key.tokens for graph in graphs] == [(3, 3), (5,), (4,), (2, 2), (2,)]
        assert set(runner.wrapper.graphs) == {graph.key for graph in graphs}
        assert all(graph.nbytes > 0 and graph.key.mode is ForwardMode.DECODE for graph in graphs)
        with pytest.raises(ConfigError, match="captured already"):
            runner.capture_graphs()


@pytest.mark.parametrize(
    ("given", "in_dbo", "sizes"), [(None, (), [9, 8, 4, 2, 1]), (None, (3, 5), [5, 3]), ((2,), (3, 5), [2])]
)
def test_sizes_come_from_the_caller_or_the_overlap_settings(
    checkpoint: Path, given: tuple[int, ...] | None, in_dbo: tuple[int, ...], sizes: list[int]
) -> None:
    dbo = UBatchConfig(enable_dbo=False, cudagraph_capture_sizes=in_dbo)
    options: dict[str, Any] = {"cudagraph_mode": "full", "cudagraph_capture_sizes": given, "graphs": FakeGraphs()}
    with make_runner(checkpoint, dbo=dbo, **options) as runner:
        assert [shape.num_tokens for shape in runner.graph_shapes] == sizes


def test_before_capture_all_runs_eagerly(checkpoint: Path, eager: ModelRunner) -> None:
    jobs = make_load(3, 4, 4)
    with make_runner(checkpoint, cudagraph_mode="full", cudagraph_capture_sizes=(4,), graphs=FakeGraphs()) as runner:
        assert serve(runner, jobs) == serve(eager, jobs)
        assert runner.statistics().graph_replays == 0


@pytest.mark.slow
def test_memory_does_not_grow(checkpoint: Path, load: Load) -> None:
    with make_captured(checkpoint, lanes=2) as runner:
        graphs = dict(runner.wrapper.graphs)
        serve(runner, load.jobs[:20])
        before = runner.attention.memory()
        serve(runner, load.jobs[:20])
        assert runner.attention.memory() == before
        assert dict(runner.wrapper.graphs) == graphs


@pytest.mark.parametrize("option", ["cudagraph_mode", "sizes", "attention", "experts"])
def test_what_cannot_be_captured_is_refused_by_name(checkpoint: Path, option: str) -> None:
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "cudagraph_mode": ({"cudagraph_mode": "piecewise"}, "unknown cudagraph_mode 'piecewise'"),
        "sizes": ({"cudagraph_capture_sizes": (4, 10)}, r"has 10, above max_num_seqs \(9\)"),
        "attention": ({"attention_backend": "torch"}, "attention back end 'torch' cannot be captured"),
        "experts": ({"experts_backend": "grouped"}, "experts back end GroupedExperts cannot be captured"),
    }
    options, complaint = wrong[option]
    with pytest.raises(ConfigError, match=complaint):
        make_runner(checkpoint, **({"cudagraph_mode": "full", "graphs": FakeGraphs()} | options))


def test_a_cpu_captures_nothing(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="CUDA graphs need a GPU, and the model runs on cpu"):
        make_runner(checkpoint, cudagraph_mode="full")
    with make_runner(checkpoint, cudagraph_mode="auto") as runner:
        assert runner.graph_shapes == ()
        assert runner.capture_graphs() == []


def test_auto_says_what_is_in_the_way(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="model_runner"),
        make_runner(checkpoint, cudagraph_mode="auto", experts_backend="grouped", graphs=FakeGraphs()) as runner,
    ):
        assert runner.graph_shapes == ()
    assert "not captured as CUDA graphs: the experts back end GroupedExperts" in caplog.text


SINGLE = UBatchConfig(
    dbo_prefill_token_threshold=4096, modes={"decode": ModeSettings("single_batch", token_threshold=4)}
)


def decode(runner: ModelRunner, count: int) -> tuple[tuple[int, ...], ...]:
    """One decode step of so many requests."""
    requests = start(runner, [3] * count)
    output = runner.execute([ScheduledRequest(request, 1) for request in requests])
    for request in requests:
        runner.release(request)
    return output.tokens


def test_single_batch_steps_are_replayed_where_they_would_overlap(checkpoint: Path) -> None:
    with (
        make_captured(checkpoint, dbo=SINGLE) as captured,
        make_runner(checkpoint, dbo=SINGLE) as eager,
        make_runner(checkpoint) as plain,
    ):
        keys = {(key.num_tokens, key.schedule) for key in captured.wrapper.graphs}
        single = {(7, "single_batch"), (4, "single_batch")}
        assert keys == single | {(7, "plain"), (4, "plain"), (2, "plain"), (1, "plain")}
        for count in (2, 3, 4, 5, 7):
            tokens = decode(captured, count)
            assert tokens == decode(eager, count) == decode(plain, count)
        seen = captured.statistics()
        assert seen.graph_replays == 5
        assert seen.engaged_single == eager.statistics().engaged_single == 3
        assert seen.engaged == plain.statistics().engaged_single == 0


@pytest.mark.slow
def test_signalled_steps_are_captured_and_replayed(checkpoint: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    modes = {"decode": ModeSettings("single_batch_signalled", token_threshold=4)}
    dbo = UBatchConfig(dbo_prefill_token_threshold=4096, modes=modes)
    options = {"all2all_backend": "host_loopback_batched", "experts_backend": "triton_batched"}
    with make_captured(checkpoint, dbo=dbo, **options) as captured, make_runner(checkpoint) as plain:
        assert (4, "single_batch_signalled") in {(key.num_tokens, key.schedule) for key in captured.wrapper.graphs}
        for count in (3, 4, 7):
            assert decode(captured, count) == decode(plain, count)
        seen = captured.statistics()
        assert (seen.graph_replays, seen.engaged_single) == (3, 2)

        # A replay calls nothing of the transport that could raise: who reads the tokens is told.
        requests = start(captured, [3] * 4)
        pending = captured.launch([ScheduledRequest(request, 1) for request in requests])
        pending.sample()
        assert captured.statistics().graph_replays == 4
        for flag in (captured.all2all._alarm.told, captured.all2all._alarm.gave_up):  # as a copy that gives up does
            flag.fill_(1)
        with pytest.raises(UBatchError, match="a copy looked"):
            pending.result()


def test_each_mode_is_captured_with_its_own_lanes_and_threshold() -> None:
    config = UBatchConfig(
        modes={
            "decode": ModeSettings(num_ubatches=3, token_threshold=6),
            "verify": ModeSettings("single_batch", token_threshold=8),
        }
    )
    decodes, verifies = graph_families([1, 2, 4, 8], config, num_speculative_tokens=3)
    assert (decodes.mode, verifies.mode) == (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
    assert [(s.lanes, s.lane_requests) for s in decodes.shapes if s.engaged] == [(3, 3)]
    overlapped = [(s.lanes, s.lane_requests, s.single) for s in verifies.shapes if s.engaged]
    assert overlapped == [(1, 2, True), (1, 4, True), (1, 8, True)]
    assert verifies.fit(1, 12) == min(shape for shape in verifies.shapes if shape.lane_tokens >= 12)
    fitting = verifies.fit(1, 12, single=True)
    assert fitting is not None
    assert (fitting.single, fitting.lane_requests) == (True, 4)
