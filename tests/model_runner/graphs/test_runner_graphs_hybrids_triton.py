"""Steps of models with linear attention as graphs: every replay has the states of its own requests, and no others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture, make_checkpoint
from fake_graphs import FakeGraphs
from request_steps import admitted, step
from runner_graph_cases import make_captured, make_runner
from torch import Tensor
from triton_linear import use_triton

from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest
from ubatch import ConfigError

pytestmark = pytest.mark.long
DRAFTS = 2


LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
HEADS = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
checkpoint = checkpoint_fixture(make_checkpoint, "Qwen3Next", **LAYERS, **HEADS)


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(131) for _ in range(rng.choice([1, 2, 5, 20]))] for _ in range(count)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """Each request alone, eagerly, with torch's operators or those in C."""
    with make_runner(checkpoint, max_num_seqs=1) as runner:
        return [list(decoded(runner, prompt, 10)) for prompt in prompts_of(7)]


def decoded(runner: ModelRunner, prompt: list[int], count: int) -> Sequence[int]:
    (request,) = admitted(runner, [prompt], count)
    while request.num_output_tokens < count:
        step(runner, [ScheduledRequest(request, request.num_uncomputed_tokens)])
    runner.release(request)
    return request.output_token_ids


def everything(runner: ModelRunner) -> list[Tensor]:
    """All that the pool holds, `[slots, ...]` of every layer."""
    assert runner.states is not None
    return [*runner.states.windows, *runner.states.states, *(each for kept in runner.states.kept for each in kept)]


def graphs_of(drafts: int) -> dict[str, Any]:
    return {"num_speculative_tokens": drafts, "cudagraph_capture_sizes": (2, 4), "threshold": 3, "max_num_seqs": 6}


@pytest.mark.wide
@pytest.mark.parametrize(("lanes", "drafts"), [(0, 0), (2, DRAFTS)])
def test_every_replay_has_the_states_of_its_own_requests(
    checkpoint: Path, expected: list[list[int]], lanes: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go, in other slots and other places of the batch, with padding; drafts are right in part."""
    use_triton(monkeypatch)
    rng, prompts = random.Random(lanes + drafts), prompts_of(7)
    with make_captured(checkpoint, lanes=lanes, **graphs_of(drafts)) as runner:
        assert not any(each.any() for each in everything(runner))  # nor did a warm-up or a capture
        before = runner.statistics().graph_replays
        waiting, running, steps, accepted = list(range(7)), [], 0, set()
        while waiting or running:
            new = waiting[: rng.randint(1, 4) if len(running) < 2 else 0][: 4 - len(running)]
            waiting = waiting[len(new) :]
            for number in new:
                request = Request(number, prompts[number], SamplingParams())
                runner.admit(request, request.num_tokens + 20)
                running.append(request)
            rng.shuffle(running)
            verify = drafts > 0 and not new and rng.random() < 0.7
            shares, right = [], []
            for request in running:
                tokens = expected[int(request.request_id)][request.num_output_tokens :][:drafts]
                right.append(rng.randint(0, len(tokens)) if verify else 0)
                guesses = [token if place < right[-1] else (token + 1) % 131 for place, token in enumerate(tokens)]
                guesses += [0] * (drafts - len(tokens))
                shares.append(ScheduledRequest(request, request.num_uncomputed_tokens, tuple(guesses) * verify))
            used = {request.row for request in running}
            unused = [slot for slot in range(runner.max_num_seqs) if slot not in used]
            for each in everything(runner):
                each[unused] = -3.0
            output = runner.execute(shares)
            steps += not new
            assert all((each[unused] == -3).all() for each in everything(runner))
            for request, share, tokens, count in zip(list(running), shares, output.tokens, right, strict=True):
                wanted = expected[int(request.request_id)][request.num_output_tokens :]
                assert list(tokens)[: len(wanted)] == wanted[: count + 1]
                accepted.add(count)
                request.num_computed_tokens += share.num_tokens + count
                request.token_ids += tokens
                if request.num_output_tokens >= 6 + int(request.request_id) % 3:
                    running.remove(request)
                    runner.release(request)
        statistics = runner.statistics()
    assert statistics.graph_replays - before == steps > 10
    assert (statistics.engaged > 0) == (lanes > 0)
    assert accepted == set(range(drafts + 1))


def test_without_triton_they_are_not_captured(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="linear attention can be captured with its Triton kernels only"):
        make_runner(checkpoint, cudagraph_mode="full", graphs=FakeGraphs())
