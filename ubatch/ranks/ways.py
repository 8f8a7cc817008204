"""The ways in which rows travel between ranks over gloo.

    near    few bytes, and the ranks are on one machine: their own sockets (`ubatch.ranks.near`)
    one     one all-to-all of gloo
    two     many bytes: a connection for each direction between two ranks
                up      a rank's own block, and those for higher ranks      `Connection.pg`
                down    those for lower ranks                               `Connection.down_pg`

Gloo's receiver announces its buffer, and the sender then writes the message. On one connection for both directions,
the rank that launches second writes its message first, because its peer's buffer is known already, and its own
announcement waits behind it. The peer begins to send when that message has travelled: the directions take turns, and
an all-to-all takes up to twice as long. With a connection for each direction nothing waits behind a message.
"""

import ctypes
import zlib
from collections.abc import Sequence
from enum import Enum, auto
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ubatch.lanes.context import current_lane
from ubatch.ranks.connection import Connection, Work, all_gather_single
from ubatch.ranks.near import MOST_BYTES, Channel
from ubatch.streams.graph_protocols import capture_mark

_bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200
_LARGE_BYTES = 256 << 10
"""Where two connections pay, between two ranks each way: measured over loopback and over links of 0.2 to 2 Gbit/s."""


class Way(Enum):
    """See the module."""

    NEAR = auto()
    ONE = auto()
    TWO = auto()


def way_of(
    connection: Connection,
    device: torch.device,
    sent: Sequence[int],
    received: Sequence[int],
    row_bytes: int,
    most_rows: int | None,
) -> Way:
    """How rows travel. All ranks must find the same, so it follows from what every rank knows.

    Args:
        connection: the ranks.
        device: of the rows.
        sent, received: rows to and from every rank. What two ranks send each other, both know.
        row_bytes: bytes of a row.
        most_rows: rows that one of more than two ranks sends another at most; None if they do not know it.
    """
    if connection.down_pg is None or device.type != "cpu":
        return Way.ONE
    if len(sent) == 2:
        other = 1 - connection.place
        least, most = sorted((sent[other], received[other]))
    elif most_rows is None:
        return Way.ONE
    else:
        least = most = most_rows
    if connection.near is not None and most * row_bytes <= MOST_BYTES and capture_mark() is None:
        return Way.NEAR  # a graph has only what goes through torch
    return Way.TWO if least * row_bytes >= _LARGE_BYTES else Way.ONE


def all_to_all_rows(
    result: Tensor,
    source: Tensor,
    received: Sequence[int],
    sent: Sequence[int] | None,
    row_bytes: int,
    connection: Connection,
    way: Way,
    name: str,
) -> list[Work]:
    """Launch an all-to-all of rows.

    Args:
        result, source: `[rows, ...]`, contiguous.
        received, sent: rows from and to every rank; None sends all rows to each, but see `sends_whole`.
        row_bytes: bytes of a row.
        connection: the ranks.
        way: from `way_of`.
        name: of the transfer.
    """
    near = connection.near
    if near is not None and way is Way.NEAR:
        lane = current_lane()
        mark = _mark(name, -1 if lane is None else lane.id)
        out = _bytes_at(source.data_ptr() or 1, source.nbytes, _WRITABLE)  # of no bytes, the address is not read
        into = _bytes_at(result.data_ptr() or 1, result.nbytes, _WRITABLE)
        keep = source, result
        return [near.exchange(Channel.DATA, out, into, sent, received, row_bytes, mark=mark, keep=keep)]
    if near is not None:
        near.pass_by(Channel.DATA)
    result, source = as_bytes(result, row_bytes), as_bytes(source, row_bytes)
    if sent is None:
        return [all_gather_single(result, source, group=connection.pg, async_op=True)]
    theirs, ours = list(received), list(sent)
    if way is not Way.TWO:
        return [dist.all_to_all_single(result, source, theirs, ours, group=connection.pg, async_op=True)]
    own = connection.place
    lower, others = [0] * own, [0] * (len(ours) - own)
    sent_down, received_up = sum(ours[:own]), sum(theirs[: own + 1])
    up = dist.all_to_all_single(
        result[:received_up],
        source[sent_down:],
        theirs[: own + 1] + others[1:],
        lower + ours[own:],
        group=connection.pg,
        async_op=True,
    )
    down = dist.all_to_all_single(
        result[received_up:],
        source[:sent_down],
        [*lower, 0, *theirs[own + 1 :]],
        ours[:own] + others,
        group=connection.down_pg,
        async_op=True,
    )
    return [up, down]


@lru_cache(256)
def _mark(name: str, lane: int) -> int:
    """A number for a transfer of a lane, the same on every rank."""
    return zlib.crc32(f"{lane} {name}".encode())


def sends_whole(way: Way, sizes: Sequence[int]) -> bool:
    """Whether gloo gathers `sizes` rows of the ranks without a copy for every rank."""
    return len(set(sizes)) == 1 and not (way is Way.TWO and len(sizes) == 2)


def dense(x: Tensor) -> Tensor:
    """`x`, or a copy of it, as a plain tensor whose memory holds its values one after the other."""
    if type(x) is Tensor and x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x
    if type(x) in (Tensor, nn.Parameter):
        return x.resolve_conj().resolve_neg().contiguous()
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def as_bytes(x: Tensor, row_bytes: int) -> Tensor:
    """A view `[rows, bytes]`: data that is only moved is sent as bytes, because no transport supports every dtype."""
    return x.view(-1).view(torch.uint8).view(x.shape[0], row_bytes)
