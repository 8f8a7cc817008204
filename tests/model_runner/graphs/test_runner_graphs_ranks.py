"""Graphs on two ranks that share experts: both replay the same shape or none, collectives included; idle ranks too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from runner_graph_cases import make_captured, make_checkpoint, make_runner

from model_runner import ModelRunner, SamplingParams, generate
from moe import register_all2all_backend
from moe.all2all.allgather_reducescatter import AllGatherReduceScatterAll2All
from ranks import run_ranks
from ubatch import CommGroup

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
