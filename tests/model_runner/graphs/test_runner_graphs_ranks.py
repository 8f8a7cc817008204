"""Graphs on two ranks that share experts: both replay the same shape or none, collectives included; idle ranks too.

And of ranks that share attention: gathers and scatters are replayed, and give the tokens of eager steps.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import make_checkpoint as make_family
from draft_cases import PROMPTS, drafted_tokens, drafting, make_head, plain_tokens
from runner_graph_cases import EXPERTS, make_captured, make_checkpoint, make_runner, start

from model_runner import ModelRunner, SamplingParams, ScheduledRequest, generate
from model_runner.drafting import load_draft
from moe import EmulatedLink, register_all2all_backend
from moe.all2all.allgather_reducescatter import AllGatherReduceScatterAll2All
from ranks import run_ranks
from ubatch import CommGroup, ConfigError, capturing
from ubatch.ranks.connection import Connection

pytestmark = pytest.mark.ranks

SIZES = (2, 4, 6)
LENGTHS = {0: [3, 9, 2, 5, 12, 4, 3], 1: [6, 2, 8]}  # of the outputs: rank 1 idles first, rank 0 begins too large


class Captured(AllGatherReduceScatterAll2All):
    """Over gloo as if it were NCCL: the fake graphs record its collectives."""

    def __init__(self, *, group: CommGroup, num_experts: int) -> None:
        super().__init__(group=group, num_experts=num_experts)
        self.traits = replace(self.traits, capturable=True)


register_all2all_backend("captured", "test_runner_graphs_ranks:Captured")


def tokens_of(runner: ModelRunner, rank: int) -> list[list[int]]:
    """Of the requests of a rank, or of all ranks of a replica."""
    prompts = [[10 * rank + n + 1] * (n + 2) for n in range(len(LENGTHS[rank]))]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in LENGTHS[rank]]
    return [list(output.token_ids) for output in generate(runner, prompts, params)]


def replay_on_rank(rank: int, world_size: int, path: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with make_runner(Path(path)) as alone:
        results["alone"] = tokens_of(alone, rank)
    group = CommGroup.from_process_group(timeout_s=20)
    for name, lanes in (("plain", 0), ("lanes", 2)):
        options: dict[str, Any] = {"group": group, "all2all_backend": "captured", "lanes": lanes, "threshold": 2}
        with make_captured(Path(path), cudagraph_capture_sizes=SIZES, **options) as runner:
            shapes = []
            agree = runner.graphs.agree  # type: ignore[union-attr]

            def record(step: Any, agree: Any = agree, shapes: list[Any] = shapes) -> Any:
                agreement = agree(step)
                graph = agreement.graph
                shapes.append(None if graph is None else (graph.lanes, graph.lane_requests))
                return agreement

            runner.graphs.agree = record  # type: ignore[union-attr,method-assign]
            results[name] = {
                "tokens": tokens_of(runner, rank),
                "shapes": shapes,
                "replays": runner.statistics().graph_replays,
                "experts": len(runner.model.layers[0].mlp.kernel.experts.expert_range),  # type: ignore[index,union-attr]
            }
    return results


def default_on_rank(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """A runner that was not told a transport, over gloo as if it were NCCL."""
    with make_runner(Path(path)) as alone:
        expected = tokens_of(alone, rank)
    group = CommGroup.from_process_group(timeout_s=20)
    # Gloo's own order is what collectives see; the runner and its transport see NCCL's.
    with mock.patch.object(CommGroup, "stream_ordered", return_value=True):
        runner = make_captured(Path(path), group=group, cudagraph_mode="auto", cudagraph_capture_sizes=SIZES)
    with runner:
        tokens = tokens_of(runner, rank)
        return {
            "same": tokens == expected,
            "transport": type(runner.all2all).__name__,
            "replays": runner.statistics().graph_replays,
        }


def test_the_default_inside_a_node_is_captured(tmp_path: Path) -> None:
    for result in run_ranks(default_on_rank, 2, str(make_checkpoint(tmp_path / "tiny"))):
        assert result["same"]
        assert result["transport"] == "AllGatherReduceScatterAll2All"
        assert result["replays"] >= 8


def machines_on_rank(rank: int, world_size: int) -> tuple[bool, bool]:
    group = CommGroup.from_process_group(timeout_s=20)
    with mock.patch("ubatch.ranks.group.machine_name", return_value=f"machine {rank}"):
        apart = group.on_one_machine()
    return group.on_one_machine(), apart


def test_ranks_know_whether_they_are_on_one_machine() -> None:
    assert run_ranks(machines_on_rank, 2) == [(True, False)] * 2


def test_ranks_replay_the_same_graphs(tmp_path: Path) -> None:
    ranks = run_ranks(replay_on_rank, 2, str(make_checkpoint(tmp_path / "tiny")))
    for rank, results in enumerate(ranks):
        for name in ("plain", "lanes"):
            assert results[name]["tokens"] == results["alone"], (rank, name)
            assert results[name]["experts"] == 2
    for name, lanes in (("plain", 1), ("lanes", 2)):
        first, second = (results[name] for results in ranks)
        assert first["shapes"] == second["shapes"]
        assert first["replays"] == second["replays"] == sum(shape is not None for shape in first["shapes"])
        assert first["replays"] >= 8
        assert None in first["shapes"]  # prefill, and seven requests
        assert any(shape is not None and shape[0] == lanes for shape in first["shapes"])


UNEVEN_SIZES = (1, 3, 6)
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


def replay_in_pairs(rank: int, world_size: int, path: str) -> dict[str, Any]:
    replica, results = rank // 2, {}
    with make_runner(Path(path)) as alone:
        results["alone"] = {"tokens": tokens_of(alone, replica), "verified": verified(alone)}
    with mock.patch.object(Connection, "is_stream_ordered", like_nccl):
        shared = in_pairs()
        with make_runner(Path(path), **shared) as eager:
            results["eager"] = play(eager, replica)
        for name, lanes in (("plain", 0), ("lanes", 2)):
            graphs = {"cudagraph_capture_sizes": UNEVEN_SIZES, "num_speculative_tokens": DRAFTS}
            with make_captured(Path(path), lanes=lanes, threshold=2, **shared, **graphs) as runner:
                results[name] = play(runner, replica)
                if world_size == 2:
                    results[name]["verified"] = verified(runner)
                    results[name]["verify replays"] = runner.statistics().graph_replays - results[name]["replays"]
    return results


@pytest.mark.slow
def test_two_ranks_of_one_replica(tmp_path: Path) -> None:
    """Dense layers and sparse ones; one token, of which one rank has nothing; decode and verify, plain and in lanes."""
    ranks = run_ranks(replay_in_pairs, 2, str(make_family(tmp_path, "Qwen3Moe")))
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
    ranks = run_ranks(replay_in_pairs, 4, str(make_checkpoint(tmp_path / "tiny")))
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
