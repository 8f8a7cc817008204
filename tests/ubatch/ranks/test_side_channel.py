"""Transfers beside the steps: they arrive though nobody waits, never meet the steps' own, and fail alone."""

import os
import time
from datetime import timedelta

import pytest
import torch
from lanes import within

import ubatch
from ranks import on_ranks
from ubatch import CommGroup, ConfigError, PeerFailed
from ubatch.ranks import SideChannel

pytestmark = pytest.mark.ranks


def block(rank: int, other: int, size: int) -> torch.Tensor:
    return torch.full((size,), 10 * rank + other, dtype=torch.uint8)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_bytes_arrive_while_steps_go_on(rank: int, group: CommGroup, world_size: int) -> None:
    """Uneven blocks, some empty; rank 1 launches later, after collectives of the group."""
    channel = SideChannel(group)
    sizes = [
        [0 if sender == receiver else 1000 * (sender + 2 * receiver) for receiver in range(world_size)]
        for sender in range(world_size)
    ]
    sent, received = sizes[rank], [row[rank] for row in sizes]
    out = torch.cat([block(rank, other, size) for other, size in enumerate(sent)])
    into = torch.zeros(sum(received) + 8, dtype=torch.uint8)
    if rank != 1:
        moved = channel.launch("experts", out, into, sent, received)
    for turn in range(3):
        with group.step():
            assert ubatch.all_reduce(torch.ones(5), group).tolist() == [world_size] * 5, turn
    if rank == 1:
        moved = channel.launch("experts", out, into, sent, received)
    assert within(10, moved.done)
    expected = torch.cat([block(other, rank, size) for other, size in enumerate(received)])
    assert torch.equal(moved.wait(), expected)
    assert into[-8:].tolist() == [0] * 8
    with pytest.raises(ConfigError, match="'experts'"):
        channel.launch("experts", out, into, [len(out) + 1] + [0] * (world_size - 1), received)


@on_ranks(2, dying=[1], timeout_s=3)
def test_a_dead_peer_is_the_steps_failure(rank: int, group: CommGroup) -> None:
    """The channel fails without a wait, and the next step names the rank that died."""
    channel = SideChannel(group)
    ubatch.all_reduce(torch.ones(1), group)
    if rank == 1:
        os._exit(1)
    moved = channel.launch("experts", block(0, 0, 8), block(0, 0, 8), [0, 8], [0, 8])
    assert within(10, moved.done)
    with pytest.raises(RuntimeError):
        moved.wait()
    assert group.broken is None
    with pytest.raises(PeerFailed, match="rank 1"), group.step():
        ubatch.all_reduce(torch.ones(1), group)


@on_ranks(2)
def test_an_emulated_link_delays_it(rank: int, group: CommGroup) -> None:
    class Late:
        def __init__(self, away: int, back: int) -> None:
            self.sizes, self.until = (away, back), time.monotonic() + 0.3

        def is_completed(self) -> bool:
            return time.monotonic() >= self.until

        def wait(self, timeout: timedelta | None = None) -> bool:
            return True

    works: list[Late] = []

    def beside(away: int, back: int) -> Late:
        works.append(Late(away, back))
        return works[-1]

    channel = SideChannel(group, beside)
    both = [4, 6] if rank == 0 else [6, 4]
    moved = channel.launch("experts", block(0, 0, 10), block(0, 0, 10), both, both)
    begun = time.monotonic()
    assert within(10, moved.done)
    assert time.monotonic() - begun > 0.25
    assert works[0].sizes == (6, 6)  # a rank's own bytes cross no link
