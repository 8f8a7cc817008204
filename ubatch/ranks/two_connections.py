"""A large all-to-all over gloo, with a connection for each direction between two ranks.

    up      a rank's own block, and those for higher ranks      `Connection.pg`
    down    those for lower ranks                               `Connection.down_pg`

Gloo's receiver announces its buffer, and the sender then writes the message. On one connection for both directions,
the rank that launches second writes its message first, because its peer's buffer is known already, and its own
announcement waits behind it. The peer begins to send when that message has travelled: the directions take turns, and
an all-to-all takes up to twice as long. With a connection for each direction nothing waits behind a message.
A small all-to-all is faster in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ubatch.ranks.connection import Connection, Work

__all__ = ["all_to_all_rows", "takes_two"]

_LARGE_BYTES = 256 << 10
"""Where two connections pay, between two ranks each way: measured over loopback and over links of 0.2 to 2 Gbit/s."""


def takes_two(
    connection: Connection,
    device: torch.device,
    sent: Sequence[int],
    received: Sequence[int],
    row_bytes: int,
    most_rows: int | None,
) -> bool:
    """Whether rows travel over two connections: two ranks send each other much at the same time. All ranks must find
    the same, so it follows from what every rank knows.

    Args:
        connection: the ranks.
        device: of the rows.
        sent, received: rows to and from every rank. What two ranks send each other, both know.
        row_bytes: bytes of a row.
        most_rows: rows that one of more than two ranks sends another at most; None if they do not know it.
    """
    if connection.down_pg is None or device.type != "cpu":
        return False
    own = connection.ranks.index(connection.rank)
    rows = min(sent[1 - own], received[1 - own]) if len(sent) == 2 else most_rows or 0
    return rows * row_bytes >= _LARGE_BYTES


def all_to_all_rows(
    result: Tensor, source: Tensor, received: list[int], sent: list[int], connection: Connection, *, two: bool
) -> list[Work]:
    """Launch an all-to-all of rows.

    Args:
        result, source: `[rows, bytes]`, contiguous.
        received, sent: rows from and to every rank.
        connection: the ranks.
        two: see `takes_two`.
    """
    if not two:
        return [dist.all_to_all_single(result, source, received, sent, group=connection.pg, async_op=True)]
    own = connection.ranks.index(connection.rank)
    lower, others = [0] * own, [0] * (len(sent) - own)
    sent_down, received_up = sum(sent[:own]), sum(received[: own + 1])
    up = dist.all_to_all_single(
        result[:received_up],
        source[sent_down:],
        received[: own + 1] + others[1:],
        lower + sent[own:],
        group=connection.pg,
        async_op=True,
    )
    down = dist.all_to_all_single(
        result[received_up:],
        source[:sent_down],
        [*lower, 0, *received[own + 1 :]],
        sent[:own] + others,
        group=connection.down_pg,
        async_op=True,
    )
    return [up, down]
