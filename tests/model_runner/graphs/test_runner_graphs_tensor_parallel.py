"""Graphs of ranks that share attention: gathers and scatters are replayed, and give the tokens of eager steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import make_checkpoint as make_family
from draft_cases import PROMPTS, drafted_tokens, drafting, make_head, plain_tokens
from runner_graph_cases import EXPERTS, make_captured, make_checkpoint, make_runner, start
from test_runner_graphs_ranks import tokens_of

from model_runner import ModelRunner, SamplingParams, ScheduledRequest, generate
from model_runner.drafting import load_draft
from moe import EmulatedLink
from ranks import run_ranks
from ubatch import CommGroup, ConfigError, capturing
from ubatch.ranks.connection import Connection

pytestmark = pytest.mark.ranks

SIZES = (1, 3, 6)
"""None of them, nor of their lanes, divides by two ranks, but one: shares are padded, and some are padding alone."""
DRAFTS = 2


def like_nccl(connection: Connection, device: torch.device) -> bool:
    """What NCCL's connections say of a GPU. Over gloo the fake graphs record and replay what was launched."""
    return device.type == "cuda" or capturing()


def verified(runner: ModelRunner) -> list[list[int]]:
    """Five verify steps of five requests, the same drafts whatever comes out."""
    rng = random.Random(3)
    requests = start(runner, [3, 6, 1, 5, 2], room=30)
    for _ in range(5):
        shares = [ScheduledRequest(each, 1, tuple(rng.randrange(50) for _ in range(DRAFTS))) for each in requests]
        for share, tokens in zip(shares, runner.execute(shares).tokens, strict=True):
            share.request.token_ids += tokens
            share.request.num_computed_tokens += len(tokens)
    return [request.output_token_ids for request in requests]


def visits_of(runner: ModelRunner) -> int:
    """Rows that experts of this rank were given, over all layers."""
    return sum(int(module.visits) for module in runner.model.modules() if hasattr(module, "visits"))


def play(runner: ModelRunner, replica: int) -> dict[str, Any]:
    """Tokens, replays and visits of a runner."""
    before = visits_of(runner)
    tokens = tokens_of(runner, replica)
    statistics = runner.statistics()
    return {
        "tokens": tokens,
        "visits": visits_of(runner) - before,
        "replays": statistics.graph_replays,
        "engaged": statistics.engaged,
    }


def replay_on_rank(rank: int, world_size: int, path: str) -> dict[str, Any]:
    replica, results = rank // 2, {}
    with make_runner(Path(path)) as alone:
        results["alone"] = {"tokens": tokens_of(alone, replica), "verified": verified(alone)}
    with mock.patch.object(Connection, "is_stream_ordered", like_nccl):
        shared = in_pairs()
        with make_runner(Path(path), **shared) as eager:
            results["eager"] = play(eager, replica)
        for name, lanes in (("plain", 0), ("lanes", 2)):
            graphs = {"cudagraph_capture_sizes": SIZES, "num_speculative_tokens": DRAFTS}
            with make_captured(Path(path), lanes=lanes, threshold=2, **shared, **graphs) as runner:
                results[name] = play(runner, replica)
                if world_size == 2:
                    results[name]["verified"] = verified(runner)
                    results[name]["verify replays"] = runner.statistics().graph_replays - results[name]["replays"]
    return results


@pytest.mark.slow
def test_two_ranks_of_one_replica(tmp_path: Path) -> None:
    """Dense layers and sparse ones; one token, of which one rank has nothing; decode and verify, plain and in lanes."""
    ranks = run_ranks(replay_on_rank, 2, str(make_family(tmp_path, "Qwen3Moe")))
    for rank, results in enumerate(ranks):
        assert results["eager"]["tokens"] == results["alone"]["tokens"], rank
        for name in ("plain", "lanes"):
            played = results[name]
            assert played["tokens"] == results["alone"]["tokens"], (rank, name)
            assert played["verified"] == results["alone"]["verified"], (rank, name)
            assert played["visits"] == results["eager"]["visits"], "padding visited experts, or tokens did not"
            assert played["replays"] >= 8
            assert played["verify replays"] == 5
        assert results["plain"]["engaged"] == 0
        assert results["lanes"]["engaged"] >= 6
    assert ranks[0]["plain"]["replays"] == ranks[1]["plain"]["replays"]


@pytest.mark.slow
def test_two_replicas_of_two_ranks(tmp_path: Path) -> None:
    """The second replica ends first, and replays padding alone from then on."""
    ranks = run_ranks(replay_on_rank, 4, str(make_checkpoint(tmp_path / "tiny")))
    for rank, results in enumerate(ranks):
        for name in ("plain", "lanes"):
            assert results[name]["tokens"] == results["alone"]["tokens"], (rank, name)
            assert results[name]["visits"] == results["eager"]["visits"], (rank, name)
            assert results[name]["replays"] == ranks[0][name]["replays"] >= 8


def in_pairs(**options: Any) -> dict[str, Any]:
    """Options of ranks of which two share attention."""
    group = CommGroup.from_process_group(timeout_s=60)
    return options | {"group": group, "tensor_parallel_size": 2, "all2all_backend": "allgather_reducescatter"}


def latent_on_rank(rank: int, world_size: int, path: str) -> tuple[Any, Any, int]:
    """Tokens of one rank and of two, and how many steps were replayed."""
    prompts, params = [[1, 2, 3], [4]], [SamplingParams(max_tokens=4, ignore_eos=True)] * 2
    with make_runner(Path(path), attention_backend="torch") as alone:
        expected = [output.token_ids for output in generate(alone, prompts, params)]
    with mock.patch.object(Connection, "is_stream_ordered", like_nccl):
        triton = {"attention_backend": "torch", "decode_attention_backend": "triton", "max_model_len": 32}
        with make_captured(Path(path), cudagraph_capture_sizes=(3,), **in_pairs(**triton)) as runner:
            tokens = [output.token_ids for output in generate(runner, prompts, params)]
            return expected, tokens, runner.statistics().graph_replays


@pytest.mark.slow
def test_latent_attention(tmp_path: Path) -> None:
    """Ranks share its heads, and each keeps all latents; the model has a dense layer, and shared experts."""
    path = make_family(tmp_path, "DeepseekV3", num_hidden_layers=2)
    for expected, tokens, replays in run_ranks(latent_on_rank, 2, str(path)):
        assert tokens == expected
        assert replays == 3


def draft_on_rank(rank: int, world_size: int, path: str, head: str) -> tuple[list[list[int]], int]:
    """Tokens with trees of drafts, and how often what drafts them was replayed."""
    with mock.patch.object(Connection, "is_stream_ordered", like_nccl):
        options = in_pairs(num_speculative_tokens=5, speculative_trees=True, cudagraph_capture_sizes=(3,))
        with make_captured(Path(path), lanes=2, threshold=2, **options) as runner:
            trees = {"num_steps": 3, "topk": 2, "num_draft_tokens": 5}
            network = load_draft("eagle", head, runner)
            proposer, requests = drafting(runner, network, params={"ignore_eos": True}, **trees)
            before = runner.statistics().graph_replays
            steps = len(drafted_tokens(runner, proposer, requests, 8, 5)) // 3
            assert runner.statistics().graph_replays - before >= steps
            assert proposer._draft.graphs is not None
            return [request.output_token_ids[:8] for request in requests], proposer._draft.graphs.replays


@pytest.mark.slow
def test_ranks_that_draft(tmp_path: Path) -> None:
    """Each drafts by itself, over graphs of its own, between the steps that both replay."""
    path = make_family(tmp_path / "target", "Qwen3Moe")
    make_head(tmp_path / "head")
    expected = plain_tokens(path, PROMPTS, 8)
    for tokens, replays in run_ranks(draft_on_rank, 2, str(path), str(tmp_path / "head")):
        assert tokens == expected
        assert replays >= 3 * 4


def refuse_on_rank(rank: int, world_size: int, path: str) -> None:
    shared = in_pairs(experts_backend=EXPERTS) | {"all2all_backend": None}
    with pytest.raises(ConfigError, match=r"full: .*_size 2\) gather over gloo, which blocks the host"):
        make_captured(Path(path), **shared)
    with mock.patch.object(Connection, "is_stream_ordered", like_nccl):
        link = EmulatedLink(0.0, 1e12)
        with pytest.raises(ConfigError, match="full: an emulated link holds back"):
            make_captured(Path(path), link=link, **shared)


def test_what_cannot_be_captured_is_refused_by_name(tmp_path: Path) -> None:
    """A dense model, so that only the gathers stand in the way."""
    run_ranks(refuse_on_rank, 2, str(make_family(tmp_path, "Llama")))
