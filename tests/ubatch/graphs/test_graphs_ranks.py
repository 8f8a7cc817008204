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
    whole = ("the larger one decides", "idle with another mode", "captured by hand, not by size")
    both = {
        "captured": [(4, 4), (8,), (2, 2), (4,)],
        **dict.fromkeys(("equal", "overlapped", "idle"), (1, 1, None)),
        **dict.fromkeys(whole, (1, 0, None)),
        "too many for both": (0, 1, "larger_than_largest"),
        "another graph for each": (0, 0, "peer_has_none"),
        **dict.fromkeys(("decode graphs replayed", "threads"), 1),
    }
    for seen, size, mode in ((first, "larger_than_largest", "peer_has_none"), (second, "peer_has_none", "no_graph")):
        assert "the ranks would capture different graphs; this one [(8, 'prefill'" in seen.pop("refused")
        assert seen == {**both, "too many for one": (0, 0, size), "another mode for one": (0, 0, mode)}
