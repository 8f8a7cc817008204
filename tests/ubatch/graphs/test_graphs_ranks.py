"""Graphs on two ranks that share collectives: all replay the same size, or all run eagerly."""

from typing import Any

import pytest
import torch
from fake_graphs import FakeGraphs
from torch import Tensor, nn

import ubatch
from ranks import run_ranks
from ubatch import CommGroup, ForwardContext, ForwardMode, UBatchConfig, UBatchWrapper, all_gather, set_forward_context

pytestmark = pytest.mark.ranks


class AtThePeer(nn.Module):
    """Lets the other rank multiply every row by its weight: there and back again, with a hand-off each time."""

    def __init__(self, group: CommGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.tensor(group.rank + 2.0))

    def forward(self, x: Tensor) -> Tensor:
        most = max(ubatch.get_forward_context().tokens_across_ranks)
        there = all_gather(torch.cat([x, x.new_zeros(most - len(x), x.shape[1])]), self.group)
        peer = slice((1 - self.group.rank) * most, (2 - self.group.rank) * most)
        back = all_gather(there[peer] * self.weight, self.group)
        return back[peer][: len(x)]


def replaying(rank: int, world_size: int) -> dict[str, Any]:
    group = CommGroup.from_process_group(timeout_s=60)
    config = UBatchConfig(verify="off", group=group, dbo_prefill_token_threshold=4, cudagraph_capture_sizes=(4, 8))
    fake = FakeGraphs()
    wrapper = UBatchWrapper(AtThePeer(group).eval(), config, "full", graphs=fake)  # type: ignore[arg-type]
    seen: dict[str, Any] = {}

    def call(what: str, *tokens: int, context: ForwardContext | None = None) -> None:
        """A call of `tokens[rank]` rows; notes whether it was replayed, whether in lanes, and why not."""
        before = wrapper.statistics()
        x = torch.randn(tokens[rank], 2)
        with set_forward_context(context):
            y = wrapper(x)
        assert torch.equal(y, x * (3 - rank)), (what, x, y)
        after = wrapper.statistics()
        missed = str(after.last_graph_miss).split(":")[0] if after.graph_misses > before.graph_misses else None
        seen[what] = (after.graph_replays - before.graph_replays, after.engaged - before.engaged, missed)

    with torch.inference_mode():
        captured = wrapper.capture_sizes(torch.zeros(8, 2))
        seen["captured"] = [graph.key.tokens for graph in captured]
        call("equal", 8, 8)
        call("the larger one decides", 3, 7)
        call("overlapped", 5, 6)
        call("idle", 0, 4)
        call("too many for one", 9, 2)
        call("too many for both", 12, 11)
        decode = ForwardContext(num_tokens=4, mode=ForwardMode.DECODE)
        call("another mode for one", 4, 4, context=decode if rank else None)
        with set_forward_context(decode):
            wrapper.capture_sizes(torch.zeros(8, 2))
        call("another graph for each", 4, 4, context=decode if rank else None)
        call("idle with another mode", 0, 4, context=decode if rank else None)
        modes = [key.mode for key, graph in wrapper.graphs.items() if graph.recording.replayed]  # type: ignore[attr-defined]
        seen["decode graphs replayed"] = modes.count(ForwardMode.DECODE)
        wrapper.capture(torch.zeros(3, 2))
        call("captured by hand, not by size", 3, 3)

        own = UBatchConfig(verify="off", group=group, cudagraph_capture_sizes=(8,) if rank else (8, 4))
        other = UBatchWrapper(AtThePeer(group).eval(), own, "full", graphs=FakeGraphs())  # type: ignore[arg-type]
        try:
            other.capture_sizes(torch.zeros(8, 2))
        except ubatch.ConfigError as refused:
            seen["refused"] = str(refused)
    seen["threads"] = len(fake.replay_threads)
    return seen


def test_ranks_replay_the_same_size_or_none() -> None:
    first, second = run_ranks(replaying, 2)
    assert first["captured"] == second["captured"] == [(4, 4), (8,), (2, 2), (4,)]
    for what, expected in (
        ("equal", (1, 1, None)),
        ("overlapped", (1, 1, None)),
        ("captured by hand, not by size", (1, 0, None)),
    ):
        assert first[what] == second[what] == expected, what
    assert first["the larger one decides"] == second["the larger one decides"] == (1, 0, None)
    assert first["idle"] == second["idle"] == (1, 1, None)
    assert first["too many for one"] == (0, 0, "larger_than_largest")
    assert second["too many for one"] == (0, 0, "peer_has_none")
    assert first["too many for both"] == second["too many for both"] == (0, 1, "larger_than_largest")
    assert first["another mode for one"] == (0, 0, "peer_has_none")
    assert second["another mode for one"] == (0, 0, "no_graph")
    assert first["another graph for each"] == second["another graph for each"] == (0, 0, "peer_has_none")
    assert first["decode graphs replayed"] == second["decode graphs replayed"] == 1
    assert first["idle with another mode"] == second["idle with another mode"] == (1, 0, None)
    assert all(
        "the ranks would capture different graphs; this one [(8, 'prefill'" in each["refused"]
        for each in (first, second)
    )
    assert first["threads"] == second["threads"] == 1
