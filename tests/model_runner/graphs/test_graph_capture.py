"""Graphs under the engine: what starting captures and says, and the same outputs from both loops."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_device
import pytest
from checkpoints import checkpoint_fixture
from draft_cases import make_head
from fake_graphs import FakeGraphs
from runner_graph_cases import TINY, make_checkpoint, make_runner

from model_runner import ModelRunner, SamplingParams
from serving.engine.options import EngineOptions
from serving.engine.rank.build import capture_graphs, make_core, warm_up, warm_up_lengths
from serving.engine.speculation import Algorithm, SpeculationConfig, runner_options
from serving.requests import EngineStatistics, RequestInput
from serving.scheduler import SchedulerConfig

pytestmark = pytest.mark.long


checkpoint = checkpoint_fixture(make_checkpoint)


def runner_of(checkpoint: Path, **options: Any) -> ModelRunner:
    settings: dict[str, Any] = {"cudagraph_mode": "full", "cudagraph_capture_sizes": (2, 4), "graphs": FakeGraphs()}
    return make_runner(checkpoint, lanes=2, threshold=2, **(settings | options))


@pytest.fixture(scope="module")
def requests() -> list[RequestInput]:
    """Prompts that begin alike, one that runs in chunks, and tails that repeat themselves, which drafts guess."""
    prompts = [[9, 8, 7, 6, 5, 4, 3, 2, n] for n in range(5)] + [[1, 2] * 30]
    return [
        RequestInput(f"r{n}", prompt, SamplingParams(max_tokens=6 + 3 * n, ignore_eos=True))
        for n, prompt in enumerate(prompts)
    ]


def run(
    runner: ModelRunner,
    checkpoint: Path,
    requests: list[RequestInput],
    *,
    overlap: bool,
    speculation: SpeculationConfig | None = None,
    step_tokens: int = 24,
) -> tuple[dict[str, list[int]], EngineStatistics]:
    scheduler = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=step_tokens, max_model_len=128)
    options = EngineOptions(checkpoint, scheduler=scheduler, speculation=speculation, overlap_schedule=overlap)
    warm_up(options, runner)
    core = make_core(options, runner)
    return fake_device.run(core, requests), core.statistics()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("overlap", "drafts"), [(False, 0), (True, 0), (False, 2)])
def test_engines_give_the_same_outputs(
    checkpoint: Path, requests: list[RequestInput], overlap: bool, drafts: int
) -> None:
    with make_runner(checkpoint) as eager:
        expected, without = run(eager, checkpoint, requests, overlap=False)
    speculation = SpeculationConfig(Algorithm.NGRAM, drafts) if drafts else None
    with runner_of(checkpoint, num_speculative_tokens=drafts, cudagraph_capture_sizes=(2, 5)) as runner:
        tokens, statistics = run(runner, checkpoint, requests, overlap=overlap, speculation=speculation)
        replays = runner.statistics().graph_replays
    assert tokens == expected
    assert without.graph_replays == 0
    uniform = {step: count for step, count in statistics.steps.items() if step.startswith(("decode", "target_verify"))}
    assert statistics.graph_replays == sum(uniform.values()) > 5  # drafts are filled up, so that all verify steps fit
    assert replays > statistics.graph_replays  # those of the warm-up
    assert drafts == 0 or (statistics.accepted_tokens > 0 and any(step.startswith("target_verify") for step in uniform))


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize(("topk", "drafts"), [(1, 3), (2, 5)], ids=["chains", "trees"])
def test_a_draft_network_is_replayed_beside_the_model(
    checkpoint: Path, requests: list[RequestInput], tmp_path: Path, topk: int, drafts: int
) -> None:
    """All verify steps are replayed, as all requests are filled up to as many drafts; and so is what drafts."""
    make_head(tmp_path / "head", hidden_size=TINY.hidden_size, vocab_size=TINY.vocab_size)
    speculation = SpeculationConfig(Algorithm.EAGLE, drafts, 3, topk, tmp_path / "head")
    with make_runner(checkpoint) as eager:
        expected, _ = run(eager, checkpoint, requests, overlap=False, step_tokens=60)
    graphs = FakeGraphs()
    options = {"graphs": graphs, "cudagraph_capture_sizes": (2, 5), **runner_options(speculation)}
    with runner_of(checkpoint, **options) as runner:
        tokens, statistics = run(runner, checkpoint, requests, overlap=False, speculation=speculation, step_tokens=60)
        of_model = runner.statistics().graph_replays
    assert tokens == expected
    uniform = {step: count for step, count in statistics.steps.items() if step.startswith(("decode", "target_verify"))}
    assert statistics.graph_replays == sum(uniform.values())
    assert any(step.startswith("target_verify") for step in uniform)
    assert graphs.replays - of_model >= 2 * statistics.graph_replays - 3  # a chain, or levels; and an extend


def test_capturing_is_logged(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with runner_of(checkpoint) as runner, caplog.at_level(logging.DEBUG, logger="serving"):
        graphs = capture_graphs(runner, show=False)
    assert [graph.key.tokens for graph in graphs] == [(4,), (2, 2), (2,), (1, 1)]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(graphs) + 1
    assert all(message.startswith("graph captured key=") and "memory=" in message for message in messages[:-1])
    assert messages[-1].startswith("graphs captured graphs=4 overlapped=2 memory=")


def test_nothing_is_captured_where_all_runs_eagerly(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make_runner(checkpoint) as runner, caplog.at_level(logging.DEBUG, logger="serving"):
        assert capture_graphs(runner) == []
    assert not caplog.records


def test_a_gpu_is_warmed_up_with_every_power_of_two_of_tokens() -> None:
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=100, max_model_len=4096)
    options = EngineOptions(Path("model"), scheduler=scheduler)
    assert warm_up_lengths(options) == [16], "on a CPU nothing is tuned"
    assert warm_up_lengths(replace(options, device="cuda")) == [100, 64, 32, 16]
