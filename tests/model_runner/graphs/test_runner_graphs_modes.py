"""Graphs of verify steps, of steps launched ahead, of Triton's, of latent and of linear attention; and the vote.

Every replay of linear attention has the states of its own requests, and no others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture
from checkpoints import make_checkpoint as make_family
from fake_graphs import FakeGraphs
from hypothesis import given
from hypothesis import strategies as st
from request_steps import Ahead, admitted, step, verify
from runner_graph_cases import EXPERTS, TINY, Job, make_captured, make_checkpoint, make_load, make_runner, serve, start
from speculating import chain
from torch import Tensor
from triton_linear import use_triton

from attention import CommonAttentionMetadata
from model_runner import Draft, ModelRunner, Request, SamplingParams, ScheduledRequest, Step, build_input_batch
from model_runner.graphs.steps import place_in_torch
from model_runner.kernels.tokens import place_lane
from tests.support.shaped_steps import decided_step, shaped_step
from ubatch import ConfigError, Decision, DeclineReason, ForwardMode, Offer, Wish, decide, split_fixed

pytestmark = pytest.mark.long

DRAFTS = 3


checkpoint = checkpoint_fixture(make_checkpoint)


# -- verify -----------------------------------------------------------------------------------------------------------


def speculate(
    runner: ModelRunner, expected: Sequence[Sequence[int]], counts: Sequence[int], *, trees: bool = False
) -> list[list[int]]:
    """Verify steps with so many drafts each, of which two thirds are right; the tokens of `start`'s requests.

    As trees, every third step: the right drafts of a chain, and behind each of its nodes one that is wrong.
    """
    rng = random.Random(0)
    requests = start(runner, [3, 6, 1, 5, 2], room=30)
    for number, count in enumerate(counts):
        drafts = []
        for request, known in zip(requests, expected, strict=True):
            ahead = [*known, *[0] * 20][request.num_output_tokens :][:count]
            if trees and number % 2 == 0:
                nodes = (ahead[node // 2] if node % 2 else (ahead[node // 2] + 1) % 61 for node in range(count))
                drafts.append(Draft(tuple(nodes), tuple(node // 2 * 2 for node in range(count))))
            else:
                drafts.append(chain(count, 0.7, TINY.vocab_size)(rng, ahead))
        verify(runner, requests, drafts)
    return [request.output_token_ids for request in requests]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The tokens of `start`'s requests without drafts or graphs."""
    with make_runner(checkpoint) as eager:
        requests = start(eager, [3, 6, 1, 5, 2], room=30)
        for _ in range(24):
            step(eager, [ScheduledRequest(request, 1) for request in requests])
        return [request.output_token_ids for request in requests]


@pytest.mark.sample(2)
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("lanes", [0, 2])
def test_verify_steps(checkpoint: Path, expected: list[list[int]], lanes: int, trees: bool) -> None:
    """Steps with as many drafts as were captured are replayed, others run eagerly; the tokens are the same."""
    counts = [DRAFTS, DRAFTS, 1, DRAFTS, 2, DRAFTS]
    options = {"num_speculative_tokens": DRAFTS, "speculative_trees": trees}
    with make_captured(checkpoint, lanes=lanes, **options) as runner:
        assert {shape.mode for shape in runner.graph_shapes} == {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}
        for tokens, known in zip(speculate(runner, expected, counts, trees=trees), expected, strict=True):
            assert tokens == known[: len(tokens)]
            assert len(tokens) > len(counts)
        statistics = runner.statistics()
        assert statistics.graph_replays == counts.count(DRAFTS)
        assert statistics.engaged >= (len(counts) if lanes else 0)


# -- launched ahead ---------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_steps_launched_before_the_last_one_is_read(checkpoint: Path) -> None:
    """The overlap loop's order: ids of pending tokens are resolved into a graph's inputs."""
    jobs = [Job(0, [n + 1] * (n + 1), SamplingParams(max_tokens=9, ignore_eos=True)) for n in range(5)]
    with make_runner(checkpoint) as eager:
        expected, _ = serve(eager, jobs)
    with make_captured(checkpoint, lanes=2) as runner:
        ahead = Ahead.admit(runner, [job.prompt for job in jobs], [job.params for job in jobs])
        assert ahead.run(9) == expected
        assert runner.statistics().graph_replays == 8


# -- back ends --------------------------------------------------------------------------------------------------------


thin = checkpoint_fixture(make_checkpoint, replace(TINY, num_hidden_layers=1, num_key_value_heads=1))
"""One layer with one key/value head: few programs for Triton's interpreter."""
TRITON: dict[str, Any] = {"attention_backend": "torch", "decode_attention_backend": "triton", "max_model_len": 32}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("lanes", "experts"), [(0, EXPERTS), (2, EXPERTS), (2, "triton")])
def test_triton_kernels(thin: Path, lanes: int, experts: str) -> None:
    """Their launches are recorded, too. Lengths are far beyond those at capture, so that keys are split."""
    jobs = [Job(n, [n + 1] * (4 + 8 * n), SamplingParams(max_tokens=4, ignore_eos=True)) for n in range(3)]
    with make_runner(thin) as eager:
        expected = serve(eager, jobs)
    options = {"experts_backend": experts, "threshold": 2, "cudagraph_capture_sizes": (3,)}
    with make_captured(thin, lanes=lanes, **TRITON, **options) as runner:
        assert serve(runner, jobs) == expected
        statistics = runner.statistics()
        assert statistics.graph_replays == len(expected[1])
        assert statistics.engaged >= (sum(size >= 2 for size in expected[1]) if lanes else 0)


@pytest.mark.slow
def test_latent_attention(tmp_path: Path) -> None:
    """DeepSeek-V2, with a dense layer and shared experts, on Triton's latent attention."""
    path = make_family(tmp_path, "DeepseekV2", num_hidden_layers=2, vocab_size=TINY.vocab_size)
    jobs = make_load(4, 3, 4)
    with make_runner(path, attention_backend="torch") as eager:
        expected = serve(eager, jobs)
    with make_captured(path, lanes=2, cudagraph_capture_sizes=(4,), **TRITON) as runner:
        assert serve(runner, jobs) == expected
        assert runner.statistics().graph_replays == len(expected[1])


# -- places -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 9), st.integers(0, 5), st.integers(0, 4), st.integers(0, 1))
def test_the_kernel_places_what_torch_places(count: int, first: int, more: int, lane: int) -> None:
    ids, positions = torch.arange(100, 120), torch.arange(300, 320)
    placed = []
    for place in (place_in_torch, place_lane):
        static = (torch.full((30,), -1), torch.full((30,), -2), torch.full((2,), -3))
        place(static, (ids, positions), slice(first, first + count), 12 * lane, max(1, count + more), lane)
        placed.append(static)
    for by_torch, by_kernel in zip(*placed, strict=True):
        assert torch.equal(by_torch, by_kernel)


# -- the vote ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def captured(checkpoint: Path) -> Any:
    with make_captured(checkpoint, lanes=2, num_speculative_tokens=1) as runner:
        yield runner


def of_length(longest: int, query_lens: Sequence[int], mode: ForwardMode) -> Step:
    """A step whose longest request has so many tokens."""
    table, slots = torch.zeros(len(query_lens), 1, dtype=torch.int32), torch.zeros(sum(query_lens), dtype=torch.int64)
    metadata = CommonAttentionMetadata.build(query_lens, [longest] * len(query_lens), table, slots, mode)
    return shaped_step(query_lens, mode, metadata=metadata)


def agreed(runner: ModelRunner, ranks: Sequence[tuple[int, int]], *, lanes: int = 1) -> Step:
    """What ranks agree on that have (requests, tokens of each) and captured what `runner` did."""
    assert runner.graphs is not None
    offers = []
    for requests, each in ranks:
        mode = ForwardMode.DECODE if each == 1 else ForwardMode.TARGET_VERIFY if each == 2 else ForwardMode.PREFILL
        could = runner.graphs.offer(of_length(5, [each] * requests, mode if requests else ForwardMode.IDLE))
        if lanes == 1:
            offer = Offer(Wish.NO, (requests * each,), 2, DeclineReason.DISABLED, graph_mode=could)
        else:
            parts = tuple(part.num_tokens for part in split_fixed(requests, each, lanes))
            offer = Offer(Wish.YES if requests else Wish.IDLE, parts, lanes, graph_mode=could)
        offers.append(offer)
    return runner.graphs.agree(decided_step(decide(offers)))


@pytest.mark.parametrize(
    ("ranks", "lanes", "room"),
    [
        ([(3, 1)], 1, 4),
        ([(3, 1), (6, 1)], 1, 7),  # the largest rank decides
        ([(3, 1), (0, 1)], 1, 4),  # a rank without tokens goes along
        ([(3, 2), (0, 1)], 1, 4),  # ... with verify steps, too
        ([(5, 1), (4, 1)], 2, 4),  # three and two, two and two: lanes of four
        ([(4, 1), (0, 1)], 2, 2),
        ([(8, 1), (3, 1)], 2, 4),  # more than the largest plain one, in lanes that fit
        ([(3, 1), (8, 1)], 1, None),  # more than the largest on one rank: all run eagerly
        ([(3, 1), (3, 2)], 1, None),  # decode and verify
        ([(3, 1), (2, 5)], 1, None),  # decode and prefill
    ],
)
def test_all_ranks_replay_one_shape_or_none(
    captured: ModelRunner, ranks: list[tuple[int, int]], lanes: int, room: int | None
) -> None:
    found = agreed(captured, ranks, lanes=lanes)
    shape = None if found.graph is None else (found.graph.lane_requests, found.graph.lanes)
    assert shape == (None if room is None else (room, lanes))
    assert bool(found.decision.graph_mode) == (room is not None)


def test_ranks_that_captured_other_graphs_are_refused(captured: ModelRunner) -> None:
    assert captured.graphs is not None
    with pytest.raises(ConfigError, match="has not captured"):
        captured.graphs.agree(decided_step(Decision(False, None, None, ((0,), (3,)), graph_mode=12345)))


def test_sequences_longer_than_the_graphs_allow_run_eagerly(captured: ModelRunner) -> None:
    assert captured.graphs is not None
    longest = captured.request_table.max_blocks * 4
    assert captured.graphs.offer(of_length(longest, [1, 1], ForwardMode.DECODE))
    assert not captured.graphs.offer(of_length(longest + 1, [1, 1], ForwardMode.DECODE))


def test_an_idle_rank_replays_padding_alone(captured: ModelRunner) -> None:
    """Its cache, but for the hidden block, stays as it is, and it has no hidden states."""
    assert captured.graphs is not None
    cache = captured.kv_cache
    before = [cache.keys(layer).clone() for layer in range(2)]
    for lanes in (1, 2):
        agreement = agreed(captured, [(0, 1), (4, 1)], lanes=lanes)
        slices = split_fixed(0, 1, 2) if lanes == 2 else None
        batch = build_input_batch((), captured.request_table, cache.spec)
        assert agreement.graph is not None
        idle = replace(batch, decision=agreement.decision, slices=slices, graph=agreement.graph)
        replays = captured.statistics().graph_replays
        with torch.inference_mode():
            assert captured.run(idle).shape == (0, TINY.hidden_size)
        assert captured.statistics().graph_replays == replays + 1
    assert all(torch.equal(cache.keys(layer), keys) for layer, keys in enumerate(before))


# -- linear attention -------------------------------------------------------------------------------------------------

LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
HEADS = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
hybrid = checkpoint_fixture(make_family, "Qwen3Next", **LAYERS, **HEADS)


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(131) for _ in range(rng.choice([1, 2, 5, 20]))] for _ in range(count)]


@pytest.fixture(scope="module")
def alone(hybrid: Path) -> list[list[int]]:
    """Each request alone, eagerly, with torch's operators or those in C."""
    with make_runner(hybrid, max_num_seqs=1) as runner:
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


@pytest.mark.wide
@pytest.mark.parametrize(("lanes", "drafts"), [(0, 0), (2, 2)])
def test_every_replay_has_the_states_of_its_own_requests(
    hybrid: Path, alone: list[list[int]], lanes: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go, in other slots and other places of the batch, with padding; drafts are right in part."""
    use_triton(monkeypatch)
    rng, prompts = random.Random(lanes + drafts), prompts_of(7)
    options = {"num_speculative_tokens": drafts, "cudagraph_capture_sizes": (2, 4), "threshold": 3, "max_num_seqs": 6}
    with make_captured(hybrid, lanes=lanes, **options) as runner:
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
                tokens = alone[int(request.request_id)][request.num_output_tokens :][:drafts]
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
                wanted = alone[int(request.request_id)][request.num_output_tokens :]
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


def test_without_triton_they_are_not_captured(hybrid: Path) -> None:
    with pytest.raises(ConfigError, match="linear attention can be captured with its Triton kernels only"):
        make_runner(hybrid, cudagraph_mode="full", graphs=FakeGraphs())
