"""The model runner's graphs on a GPU: captured by CUDA, the same tokens as eager steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture
from draft_cases import drafted_tokens, drafting
from host_waits import no_host_waits
from runner_graph_cases import TINY, make_captured, make_checkpoint, make_load, make_runner, serve, start

from model_runner import SamplingParams, ScheduledRequest, generate
from model_runner.drafting import load_draft

pytestmark = pytest.mark.gpu

SMALL = replace(
    TINY, hidden_size=128, head_dim=64, num_experts=8, moe_intermediate_size=64, max_position_embeddings=512
)
ON_GPU: dict[str, Any] = {
    "device": "cuda",
    "attention_backend": "triton",
    "experts_backend": "triton",
    "block_size": 16,
    "num_kv_blocks": 400,
}
CAPTURED: dict[str, Any] = {**ON_GPU, "graphs": None, "cudagraph_mode": "full"}


checkpoint = checkpoint_fixture(make_checkpoint, SMALL)


@pytest.mark.parametrize(("lanes", "room"), [(0, 7), (2, 2 * 4), (3, 3 * 3)])
def test_tokens_are_those_of_eager_steps(checkpoint: Path, lanes: int, room: int) -> None:
    load = make_load(60, 250, 60)
    with make_runner(checkpoint, **ON_GPU) as eager:
        expected = serve(eager, load)
    with make_captured(checkpoint, lanes=lanes, **CAPTURED) as runner:
        before = runner.statistics()
        assert serve(runner, load) == expected
        statistics = runner.statistics()
    assert statistics.graph_replays == sum(size <= room for size in expected[1])
    assert statistics.lane_threads_started == before.lane_threads_started


@pytest.mark.parametrize("shape", [{"num_steps": 3}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 5}])
def test_drafts_of_graphs(checkpoint: Path, shape: dict[str, int]) -> None:
    """The model drafts for itself, chains and trees, so that drafts are right; tokens are those without drafts."""
    prompts, drafts = [[n + 1] * (n + 3) for n in range(5)], shape.get("num_draft_tokens", 3)
    with make_runner(checkpoint, **ON_GPU) as eager:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        expected = [list(output.token_ids) for output in generate(eager, prompts, params)]
    options = {"num_speculative_tokens": drafts, "speculative_trees": "topk" in shape}
    with make_captured(checkpoint, **CAPTURED, **options) as runner:
        proposer, requests = drafting(
            runner, load_draft("draft_model", checkpoint, runner), prompts, params={"ignore_eos": True}, **shape
        )
        lengths = drafted_tokens(runner, proposer, requests, 24, drafts)
        assert [request.output_token_ids[:24] for request in requests] == expected
        assert sum(lengths) / len(lengths) > 3
        graphs = proposer._draft.graphs
        assert graphs is not None
        assert graphs.replays >= runner.statistics().graph_replays > 0


@pytest.mark.parametrize("lanes", [0, 2])
def test_replays_hold_no_more_memory(checkpoint: Path, lanes: int) -> None:
    with make_captured(checkpoint, lanes=lanes, **CAPTURED) as runner:
        requests = start(runner, [5] * 6, room=130)
        held = []
        for step in range(120):
            output = runner.execute([ScheduledRequest(request, 1) for request in requests])
            for request, (token,) in zip(requests, output.tokens, strict=True):
                request.advance(1, token)
            if step % 40 == 10:
                torch.cuda.synchronize()
                held.append(torch.cuda.memory_allocated())
        assert runner.statistics().graph_replays == 120
        assert held[1:] == held[:1] * 2


def test_a_launch_does_not_wait_for_the_device(checkpoint: Path) -> None:
    with make_captured(checkpoint, lanes=2, **CAPTURED) as runner:
        requests = start(runner, [5] * 6)
        shares = [ScheduledRequest(request, 1) for request in requests]
        runner.execute(shares)  # compiles what fills the inputs
        torch.cuda.synchronize()
        with no_host_waits():
            step = runner.launch(shares)
            step.sample()
        assert step.result().decision.graph_mode
