"""Rows over gloo: few travel over the ranks' own sockets, many have a connection for each direction."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks
from ubatch import CommGroup, launch_all_gather, launch_all_to_all_single
from ubatch.ranks import ways
from ubatch.ranks.ways import Way, way_of

ROW = 1024  # floats, 4 KiB


def blocks(source: int, sizes: list[int]) -> torch.Tensor:
    """Rows that say from where to where they go."""
    rows = [torch.full((size, ROW), 10.0 * source + target) for target, size in enumerate(sizes)]
    return torch.cat(rows)


def sizes_of(world_size: int, each: int) -> list[list[int]]:
    """`[source][target]` rows: unlike, and of three ranks the first sends the last nothing."""
    sizes = [[each + 3 * source + target for target in range(world_size)] for source in range(world_size)]
    if world_size > 2:
        sizes[0][-1] = 0
    return sizes


@pytest.mark.parametrize(
    ("world_size", "each", "launches"),
    [(2, 80, 6), (3, 80, 6), (2, 8, 3), (3, 2, 3), (2, 4, 0), (3, 0, 0)],
    ids=["2-many", "3-many", "2-between", "3-between", "2-few", "3-few"],
)
@on_ranks()
def test_rows_by_every_way(rank: int, group: CommGroup, world_size: int, each: int, launches: int) -> None:
    """Three exchanges under way at once: many rows have a connection for each direction, and few need no gloo."""
    sizes = sizes_of(world_size, each)
    launched: list[tuple[int, int]] = []
    launch = dist.all_to_all_single

    def counted(into: Any, out_of: Any, theirs: list[int], ours: list[int], **how: Any) -> Any:
        launched.append((sum(ours[rank + 1 :]), sum(ours[:rank])))
        return launch(into, out_of, theirs, ours, **how)

    received = [of[rank] for of in sizes]
    most = max(map(max, sizes))
    expected = torch.cat([torch.full((size, ROW), 10.0 * source + rank) for source, size in enumerate(received)])
    with mock.patch.object(ways.dist, "all_to_all_single", counted):
        transfers = [
            launch_all_to_all_single(blocks(rank, sizes[rank]), group, received, sizes[rank], most_rows=most)
            for _ in range(3)
        ]
    for transfer in transfers:
        assert torch.equal(transfer.wait(), expected)
    gathered = launch_all_gather(torch.full((each, ROW), float(rank)), group).wait()
    assert gathered[:, 0].tolist() == [float(source) for source in range(world_size) for _ in range(each)]
    assert len(launched) == launches
    if launches == 6:
        assert all(min(up, down) == 0 for up, down in launched)
        assert sum(up for up, _ in launched) > 0 or rank == world_size - 1
        assert sum(down for _, down in launched) > 0 or rank == 0


def test_all_ranks_reckon_alike() -> None:
    def way(
        rank: int, sent: list[int], received: list[int], most_rows: int | None = None, row: int = 64 << 10, **other: Any
    ) -> Way:
        connection: Any = SimpleNamespace(**{"down_pg": "gloo", "place": rank, "near": "sockets"} | other)
        return way_of(connection, torch.device("cpu"), sent, received, row, most_rows)

    for rows, expected in ((4, Way.TWO), (3, Way.ONE)):  # of 64 KiB
        assert way(0, [9, rows], [9, 7]) is way(1, [7, 4], [rows, 4]) is expected
    assert way(0, [9, 5, 9], [9, 7, 9]) is Way.ONE  # nobody knows what the others send
    assert way(2, [1, 1, 1], [0, 0, 1], most_rows=40) is Way.TWO
    for rows, expected in ((32, Way.NEAR), (33, Way.ONE)):  # of 1 KiB
        assert way(0, [99, rows], [99, 7], row=1024) is way(1, [7, 0], [rows, 0], row=1024) is expected
        assert way(0, [9, 9, 9], [1, 1, 9], rows, row=1024) is expected
    assert way(0, [9, 1], [9, 1], row=1024, near=None) is Way.ONE
    assert way(0, [9, 1], [9, 1], row=1024, down_pg=None) is Way.ONE
