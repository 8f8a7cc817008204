"""Collectives that overlap: inside a lane they hand the baton on while the data travels, outside they are plain.

    y = all_reduce(x, group)        launch | point "collective" | wait -> y
    y = all_gather(x, group, point="attn_gather")       the same, at a point of its own

Two layers: `launch_*` returns a `Transfer` (for all-to-all back ends, which place the points themselves), and the
functions without prefix launch, pass the point and wait. All are functional: the input is never written.
Shapes: `x` is split and concatenated along `dim`, 0 unless said otherwise.

On CUDA a lane's communication stream carries the transfer from launch to end, though NCCL runs it on a stream of its
own: the launch makes the communication stream wait for that one. So marking and joining the communication stream is
enough, whoever waits, and when nobody does. Results are allocated on the compute stream, which reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ubatch.connection import Connection, Work
from ubatch.context import current_lane
from ubatch.dbo import (
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_yield,
    on_comm_stream,
    on_compute_stream,
)
from ubatch.errors import ConfigError, GradientError, UnvotedCollectiveError
from ubatch.group import CommGroup
from ubatch.host_copy import CopiedWork, check_not_capturing, host_like, mark_copied
from ubatch.schedule import Point
from ubatch.transfer import Transfer

__all__ = [
    "Carry",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "check_launch",
    "launch_all_gather",
    "launch_all_reduce",
    "launch_all_to_all_single",
    "launch_reduce_scatter",
    "reduce_scatter",
]

Carry = Callable[[Transfer[Tensor]], Transfer[Tensor]]
"""What a launched transfer is handed to, before anybody waits for it."""


def all_reduce(x: Tensor, group: CommGroup) -> Tensor:
    """The sum of every rank's `x`; same shape and dtype.

    Raises:
        GradientError, UnvotedCollectiveError, GroupBroken: before anything is launched.
        PeerFailed, TransferTimeout: while it waits.
    """
    return _overlapped(lambda: launch_all_reduce(x, group))


def all_gather(
    x: Tensor,
    group: CommGroup,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    point: str = Point.COLLECTIVE,
    name: str = "all_gather",
    carry: Carry | None = None,
) -> Tensor:
    """Every rank's `x`, concatenated along `dim`. Errors as `all_reduce`.

    Args:
        x: equal shapes, but for `dim` where `sizes` are given.
        group: the ranks.
        dim: of the ranks' blocks.
        sizes: of every rank's block; equal if None.
        point: passed while it travels.
        name: for traces and errors.
        carry: takes the launched transfer, and may delay it: an emulated link's.
    """
    moved = x if dim == 0 else x.movedim(dim, 0)
    gathered = _overlapped(lambda: launch_all_gather(moved, group, sizes=sizes, name=name), point, carry)
    return gathered if dim == 0 else gathered.movedim(0, dim).contiguous()


def reduce_scatter(
    x: Tensor,
    group: CommGroup,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    point: str = Point.COLLECTIVE,
    name: str = "reduce_scatter",
    carry: Carry | None = None,
) -> Tensor:
    """This rank's block along `dim` of the sum of every rank's `x`.

    Errors as `all_reduce`, and `ConfigError` where the size does not divide by the ranks, or is not that of `sizes`.

    Args:
        x: equal shapes on all ranks.
        group: the ranks.
        dim: of the ranks' blocks.
        sizes: of every rank's block; equal if None.
        point: passed while it travels.
        name: for traces and errors.
        carry: as for `all_gather`.
    """
    moved = x if dim == 0 else x.movedim(dim, 0)
    scattered = _overlapped(lambda: launch_reduce_scatter(moved, group, sizes=sizes, name=name), point, carry)
    return scattered if dim == 0 else scattered.movedim(0, dim).contiguous()


def all_to_all_single(
    x: Tensor,
    group: CommGroup,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Block r of `x` goes to rank r; returns the blocks received, in rank order. Errors as `all_reduce`."""
    return _overlapped(lambda: launch_all_to_all_single(x, group, output_split_sizes, input_split_sizes))


def _overlapped(
    launch: Callable[[], Transfer[Tensor]], point: str = Point.COLLECTIVE, carry: Carry | None = None
) -> Tensor:
    dbo_maybe_run_recv_hook()
    transfer = launch() if carry is None else carry(launch())
    dbo_register_recv_hook(transfer.wait)
    dbo_yield(point)
    return transfer.wait()


def launch_all_to_all_single(
    x: Tensor,
    group: CommGroup,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    name: str = "all_to_all",
    to_host: bool = False,
) -> Transfer[Tensor]:
    """Launch an all-to-all of rows.

    Args:
        x: `[sum(input_split_sizes), ...]`.
        group: the ranks.
        output_split_sizes: rows received from each rank; equal blocks if None.
        input_split_sizes: rows sent to each rank; equal blocks if None.
        name: for traces and errors.
        to_host: the result is a few numbers that the host reads. It arrives in host memory, and `wait` waits for it
            alone, not for what compute has queued.

    Returns:
        A transfer of `[sum(output_split_sizes), ...]`.
    """
    connection = check_launch(x, group, name)
    sent = _block_sizes(x, group, input_split_sizes, "input_split_sizes")
    received = sent if output_split_sizes is None else list(output_split_sizes)
    if len(received) != group.size or min(received) < 0:
        raise ConfigError(f"output_split_sizes {received} must be {group.size} numbers of rows, one per rank.")
    if received[group.rank] != sent[group.rank]:
        raise ConfigError(
            f"rank {group.rank} sends itself {sent[group.rank]} rows (input_split_sizes {sent}), "
            f"but expects {received[group.rank]} (output_split_sizes {received})."
        )
    source = x.contiguous()
    row_bytes = _row_bytes(source)
    result = _new_result(source, sum(received))
    return _launch(
        name,
        group,
        connection,
        source,
        result,
        lambda: dist.all_to_all_single(
            _as_bytes(result), _as_bytes(source), received, sent, group=connection.pg, async_op=True
        ),
        bytes_sent=(sum(sent) - sent[group.rank]) * row_bytes,
        bytes_received=(sum(received) - received[group.rank]) * row_bytes,
        to_host=to_host,
    )


def launch_all_gather(
    x: Tensor, group: CommGroup, *, sizes: Sequence[int] | None = None, name: str = "all_gather", to_host: bool = False
) -> Transfer[Tensor]:
    """Launch an all-gather of rows.

    Args:
        x: `[rows, ...]`.
        group: the ranks.
        sizes: rows of every rank where they differ; equal if None.
        name: for traces and errors.
        to_host: as for `launch_all_to_all_single`.

    Returns:
        A transfer of `[sum(sizes), ...]`, in rank order.
    """
    connection = check_launch(x, group, name)
    rows = _rows(x)
    sizes = [rows] * group.size if sizes is None else list(sizes)
    if len(sizes) != group.size or min(sizes) < 0 or sizes[group.rank] != rows:
        raise ConfigError(f"sizes {sizes} must have one number per rank ({group.size}), and this rank has {rows} rows.")
    source = x.contiguous()
    result = _new_result(source, sum(sizes))

    even = len(set(sizes)) == 1
    sent = _as_bytes(source) if even else _as_bytes(source).repeat(group.size, 1)

    def send_to_all() -> Any:
        if even:
            return _all_gather_single(_as_bytes(result), sent, group=connection.pg, async_op=True)
        return dist.all_to_all_single(
            _as_bytes(result), sent, sizes, [rows] * group.size, group=connection.pg, async_op=True
        )

    row_bytes = _row_bytes(source)
    return _launch(
        name,
        group,
        connection,
        sent,
        result,
        send_to_all,
        bytes_sent=rows * (group.size - 1) * row_bytes,
        bytes_received=(sum(sizes) - rows) * row_bytes,
        to_host=to_host,
    )


def launch_all_reduce(x: Tensor, group: CommGroup, *, name: str = "all_reduce") -> Transfer[Tensor]:
    """Launch a sum over the ranks; a transfer of `x`'s shape. Counts a ring's bytes: 2 (R - 1) / R of `x` each way."""
    connection = check_launch(x, group, name)
    _check_summable(x)
    with on_compute_stream():
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
    result.copy_(x)
    ring = 2 * (group.size - 1) * result.nbytes // group.size
    return _launch(
        name,
        group,
        connection,
        x,
        result,
        lambda: dist.all_reduce(result, group=connection.pg, async_op=True),
        bytes_sent=ring,
        bytes_received=ring,
    )


def launch_reduce_scatter(
    x: Tensor, group: CommGroup, *, sizes: Sequence[int] | None = None, name: str = "reduce_scatter"
) -> Transfer[Tensor]:
    """Launch a sum over the ranks of which each keeps its block of rows.

    Carried by an all-to-all of the blocks and a local sum in `wait`, which works on every transport and size.

    Args:
        x: `[sum(sizes), ...]`.
        group: the ranks.
        sizes: rows each rank keeps; equal if None.
        name: for traces and errors.

    Returns:
        A transfer of `[sizes[rank], ...]`.
    """
    check_launch(x, group)
    _check_summable(x)
    sent = _block_sizes(x, group, sizes, "sizes")
    own, shape = sent[group.rank], x.shape[1:]
    blocks = launch_all_to_all_single(x, group, [own] * group.size, sent, name=name)
    return blocks.map(lambda received: received.view(group.size, own, *shape).sum(0, dtype=received.dtype))


def _block_sizes(x: Tensor, group: CommGroup, sizes: Sequence[int] | None, what: str) -> list[int]:
    rows = _rows(x)
    if sizes is None:
        if rows % group.size:
            raise ConfigError(f"{rows} rows do not divide by {group.size} ranks; pad them, or give {what}.")
        return [rows // group.size] * group.size
    if len(sizes) != group.size or min(sizes) < 0 or sum(sizes) != rows:
        raise ConfigError(f"{what} {list(sizes)} must be {group.size} numbers, one per rank, that sum to {rows} rows.")
    return list(sizes)


def _rows(x: Tensor) -> int:
    if x.dim() == 0:
        raise ConfigError("a 0-dim tensor has no rows to send to other ranks. Give it a dimension: x.view(1).")
    return x.shape[0]


def _check_summable(x: Tensor) -> None:
    if x.dtype in _FP8:
        raise ConfigError(f"{x.dtype} travels, but nobody sums it. Convert it first, for example to bfloat16.")


def check_launch(x: Tensor, group: CommGroup, launches: str | None = None) -> Connection:
    """What to launch on, once everything is known to be right. For transports that launch by other means, too.

    Args:
        x: what travels.
        group: the ranks.
        launches: the name of what is launched next, for `ubatch.launch_order`; None if that is checked once more.

    Raises:
        ConfigError: `group` is none.
        GradientError, UnvotedCollectiveError, GroupBroken: see `all_reduce`.
    """
    if not isinstance(group, CommGroup):
        raise ConfigError(
            f"group must be a CommGroup, not {type(group).__name__}. Make one: CommGroup.from_process_group(pg)."
        )
    lane = current_lane()
    if lane is not None:
        if x.requires_grad and torch.is_grad_enabled():
            raise GradientError(
                f"a collective in lane {lane.id} got a tensor of shape {tuple(x.shape)} that requires grad. "
                "Run under torch.no_grad() or torch.inference_mode(); training with collectives runs unsplit."
            )
        if group.size > 1 and not lane.voted_ranks.issuperset(group.ranks):
            raise UnvotedCollectiveError(
                f"a collective over ranks {list(group.ranks)} in lane {lane.id}, but they did not vote on this split, "
                "so they could dead-lock. Set UBatchConfig.group to a CommGroup of all these ranks."
            )
    connection = group.usable_connection()
    if launches is not None:
        connection.note_launch(-1 if lane is None else lane.id, launches, x)
    return connection


def _new_result(source: Tensor, rows: int) -> Tensor:
    with on_compute_stream():
        return source.new_empty((rows, *source.shape[1:]))


def _launch(
    name: str,
    group: CommGroup,
    connection: Connection,
    source: Tensor,
    result: Tensor,
    start: Callable[[], Work | None],
    *,
    bytes_sent: int,
    bytes_received: int,
    to_host: bool = False,
) -> Transfer[Tensor]:
    stream_ordered = connection.is_stream_ordered(source.device)
    lane = current_lane()
    copied_to_host = to_host and stream_ordered
    if copied_to_host:
        check_not_capturing(name)
    keep, arrived = [source, result], result
    with on_comm_stream():
        work = start()
        if work is not None and stream_ordered and (lane is not None or copied_to_host):
            work.wait()
            work = _CarriedWork(work)
        if copied_to_host:
            arrived = host_like(result).copy_(result, non_blocking=True)
            keep.append(arrived)
            work = CopiedWork(mark_copied(source.device, lane))
    return Transfer(
        name,
        (work,) if work is not None else (),
        lambda: arrived,
        connection=connection,
        stream_ordered=stream_ordered and not copied_to_host,
        keep=keep,
        bytes_sent=bytes_sent,
        bytes_received=bytes_received,
    )


class _CarriedWork:
    """A work that the lane's communication stream waits for already: whoever joins that needs nothing else of it."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: object = None) -> bool:
        return True


_FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})

# Its name since torch 2.13, and before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _as_bytes(x: Tensor) -> Tensor:
    """`[rows, bytes]`: what only moves, moves as bytes, for no transport knows every dtype."""
    return x.view(-1).view(torch.uint8).view(x.shape[0], _row_bytes(x))


def _row_bytes(x: Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()
