"""Collectives that overlap: inside a lane they hand the baton on while the data travels; outside they just wait.

    y = all_reduce(x, group)        launch | point "collective" | wait -> y
    y = all_gather(x, group, point="attn_gather")       the same, at a named point

Two layers: `launch_*` returns a `Transfer` (for all-to-all back ends, which place the points themselves), and the
functions without prefix launch, pass the point and wait. All are functional: the input is never written.
Shapes: `x` is split and concatenated along `dim`, 0 unless said otherwise.

Outside a lane the functions without prefix are differentiable (`_Collective`): a rank gets the
gradient of the sum of all ranks' losses, as from `torch.distributed.nn`. If all ranks compute the same loss, divide it
by the number of ranks. The backward runs collectives of its own, so **every rank of the group takes part in it**, in
the same order: if a rank does not use a result, or does not call backward, the others wait until their time-out. Make
its loss depend on the result: `loss + 0 * y.sum()`. Inside a lane, and in `launch_*` anywhere, a tensor that requires
grad is refused, because a transfer has no gradient.

On CUDA, NCCL runs a transfer on its own stream; the launch makes the lane's communication stream wait for it. So it is
enough to record and wait for events on the communication stream, whether or not a lane waits for the transfer. Results
are allocated on the compute stream, which reads them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ubatch.dbo import dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield, on_comm_stream, on_compute_stream
from ubatch.errors import ConfigError
from ubatch.lanes.ambient import function_transform
from ubatch.lanes.context import current_lane
from ubatch.ranks.connection import Connection, Work, lead_again, leading_connection
from ubatch.ranks.group import CommGroup
from ubatch.ranks.host_copy import CopiedWork, check_not_capturing, host_like, mark_copied
from ubatch.ranks.launch_checks import block_sizes, check_launch, check_summable, rows_of
from ubatch.ranks.transfer import Transfer
from ubatch.ranks.ways import Way, all_to_all_rows, as_bytes, dense, sends_whole, way_of
from ubatch.schedules.schedule import Point

Carry = Callable[[Transfer[Tensor]], Transfer[Tensor]]
"""Receives a launched transfer before it is waited for."""


def all_reduce(x: Tensor, group: CommGroup) -> Tensor:
    """The sum of every rank's `x`; same shape and dtype.

    Its gradient is the sum of every rank's gradients: all ranks take part in the backward.

    Raises:
        GradientError: `x` requires grad, in a lane.
        UnvotedCollectiveError, GroupBroken: raised before the launch.
        PeerFailed, TransferTimeout: raised during the wait.
    """

    def reduce(x: Tensor, name: str = "all_reduce") -> Tensor:
        return _overlapped(lambda: launch_all_reduce(x, group, name=name))

    return differentiable(x, reduce, functools.partial(reduce, name="gradient of all_reduce"))


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

    Its gradient is this rank's block of the sum of every rank's gradients: all ranks take part in the backward.

    Args:
        x: equal shapes on all ranks; with `sizes`, they may differ along `dim`.
        group: the ranks.
        dim: of the ranks' blocks.
        sizes: of every rank's block; equal if None.
        point: passed while it travels.
        name: for traces and errors.
        carry: called with the launched transfer; may delay it, to emulate a slower link.
    """
    there, back = _gatherer(group, sizes, point, name, carry), _scatterer(group, sizes, point, _back(name), carry)
    return _along(dim, x, lambda rows: differentiable(rows, there, back))


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

    Its gradient is every rank's gradients, concatenated: all ranks take part in the backward.
    Errors as `all_reduce`, and `ConfigError` if the size is not divisible by the ranks, or not the sum of `sizes`.

    Args:
        x: equal shapes on all ranks.
        group: the ranks.
        dim: of the ranks' blocks.
        sizes: of every rank's block; equal if None.
        point: passed while it travels.
        name: for traces and errors.
        carry: as for `all_gather`.
    """
    there, back = _scatterer(group, sizes, point, name, carry), _gatherer(group, sizes, point, _back(name), carry)
    return _along(dim, x, lambda rows: differentiable(rows, there, back))


def all_to_all_single(
    x: Tensor,
    group: CommGroup,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Block r of `x` goes to rank r; returns the blocks received, in rank order. Errors as `all_reduce`.

    Its gradient goes back to the rank that `x` came from: all ranks take part in the backward.
    """
    sent = None if input_split_sizes is None else list(input_split_sizes)
    received = None if output_split_sizes is None else list(output_split_sizes)
    rows = x.shape[0] if x.dim() else 0  # a 0-dim tensor is refused before the launch

    def there(x: Tensor) -> Tensor:
        return _overlapped(lambda: launch_all_to_all_single(x, group, received, sent))

    def back(grad: Tensor) -> Tensor:
        own = [rows // group.size] * group.size if sent is None else sent
        theirs = own if received is None else received
        return _overlapped(lambda: launch_all_to_all_single(grad, group, own, theirs, name=_back("all_to_all")))

    return differentiable(x, there, back)


def _gatherer(
    group: CommGroup, sizes: Sequence[int] | None, point: str, name: str, carry: Carry | None
) -> Callable[[Tensor], Tensor]:
    own = None if sizes is None else list(sizes)
    return lambda x: _overlapped(lambda: launch_all_gather(x, group, sizes=own, name=name), point, carry)


def _scatterer(
    group: CommGroup, sizes: Sequence[int] | None, point: str, name: str, carry: Carry | None
) -> Callable[[Tensor], Tensor]:
    own = None if sizes is None else list(sizes)
    return lambda x: _overlapped(lambda: launch_reduce_scatter(x, group, sizes=own, name=name), point, carry)


def _along(dim: int, x: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of rows along dimension `dim`."""
    return rows(x) if dim == 0 else rows(x.movedim(dim, 0)).movedim(0, dim).contiguous()


def _back(name: str) -> str:
    """Name of a gradient's collective, for traces and errors."""
    return f"gradient of {name}"


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
    most_rows: int | None = None,
) -> Transfer[Tensor]:
    """Launch an all-to-all of rows. Over gloo its size decides how they travel (`ubatch.ranks.ways`).

    Args:
        x: `[sum(input_split_sizes), ...]`.
        group: the ranks.
        output_split_sizes: rows received from each rank; equal blocks if None.
        input_split_sizes: rows sent to each rank; equal blocks if None.
        name: for traces and errors; the same on all ranks.
        to_host: the result is a few numbers that the host reads. It arrives in host memory, and `wait` waits for it
            only, not for queued compute.
        most_rows: rows that a rank sends another at most; None if unknown. It tells more than two ranks how large the
            transfer is, and must be the same on all: else they wait for each other until the time-out.

    Returns:
        A transfer of `[sum(output_split_sizes), ...]`.
    """
    connection = check_launch(x, group, name)
    sent = block_sizes(x, group, input_split_sizes, "input_split_sizes")
    received = sent if output_split_sizes is None else list(output_split_sizes)
    if len(received) != group.size or min(received) < 0:
        raise ConfigError(f"output_split_sizes {received} must be {group.size} numbers of rows, one per rank.")
    if received[group.rank] != sent[group.rank]:
        raise ConfigError(
            f"rank {group.rank} sends itself {sent[group.rank]} rows (input_split_sizes {sent}), "
            f"but expects {received[group.rank]} (output_split_sizes {received})."
        )
    source = dense(x)
    row_bytes = math.prod(source.shape[1:]) * source.element_size()
    result = _new_result(source, sum(received))
    way = way_of(connection, source.device, sent, received, row_bytes, most_rows)
    exchange = functools.partial(all_to_all_rows, result, source, received, sent, row_bytes, connection, way, name)
    bytes_sent = (sum(sent) - sent[group.rank]) * row_bytes
    bytes_received = (sum(received) - received[group.rank]) * row_bytes
    return _launch(name, connection, source, result, exchange, bytes_sent, bytes_received, to_host)


def launch_all_gather(
    x: Tensor, group: CommGroup, *, sizes: Sequence[int] | None = None, name: str = "all_gather", to_host: bool = False
) -> Transfer[Tensor]:
    """Launch an all-gather of rows.

    Args:
        x: `[rows, ...]`.
        group: the ranks.
        sizes: rows of every rank. None if all have as many: else they wait for each other until the time-out.
        name: for traces and errors.
        to_host: as for `launch_all_to_all_single`.

    Returns:
        A transfer of `[sum(sizes), ...]`, in rank order.
    """
    connection = check_launch(x, group, name)
    rows = x.shape[0] if x.dim() else rows_of(x)
    sizes = [rows] * group.size if sizes is None else list(sizes)
    if len(sizes) != group.size or min(sizes) < 0 or sizes[group.rank] != rows:
        raise ConfigError(f"sizes {sizes} must have one number per rank ({group.size}), and this rank has {rows} rows.")
    source = dense(x)
    result = _new_result(source, sum(sizes))

    row_bytes = math.prod(source.shape[1:]) * source.element_size()
    own = [rows] * group.size
    way = way_of(connection, source.device, own, sizes, row_bytes, max(sizes))
    sent = None if way is Way.NEAR or sends_whole(way, sizes) else own
    if sent is not None:
        source = as_bytes(source, row_bytes).repeat(group.size, 1)
    gather = functools.partial(all_to_all_rows, result, source, sizes, sent, row_bytes, connection, way, name)
    bytes_sent, bytes_received = rows * (group.size - 1) * row_bytes, (sum(sizes) - rows) * row_bytes
    return _launch(name, connection, source, result, gather, bytes_sent, bytes_received, to_host)


def launch_all_reduce(x: Tensor, group: CommGroup, *, name: str = "all_reduce") -> Transfer[Tensor]:
    """Launch a sum over the ranks; a transfer of `x`'s shape. Counts a ring's bytes: 2 (R - 1) / R of `x` each way."""
    connection = check_launch(x, group, name)
    check_summable(x)
    with on_compute_stream():
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
    result.copy_(x)

    def reduce() -> Sequence[Work]:
        return [dist.all_reduce(result, group=connection.pg, async_op=True)]

    ring = 2 * (group.size - 1) * result.nbytes // group.size
    return _launch(name, connection, x, result, reduce, ring, ring)


def launch_reduce_scatter(
    x: Tensor, group: CommGroup, *, sizes: Sequence[int] | None = None, name: str = "reduce_scatter"
) -> Transfer[Tensor]:
    """Launch a sum over the ranks; each rank keeps its block of rows.

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
    check_summable(x)
    sent = block_sizes(x, group, sizes, "sizes")
    own, shape = sent[group.rank], x.shape[1:]
    blocks = launch_all_to_all_single(x, group, [own] * group.size, sent, name=name, most_rows=max(sent))
    return blocks.map(lambda received: received.view(group.size, own, *shape).sum(0, dtype=received.dtype))


def _new_result(source: Tensor, rows: int) -> Tensor:
    lane, shape = current_lane(), (rows, *source.shape[1:])
    if lane is None or not lane.on_comm:
        return source.new_empty(shape)
    with on_compute_stream():
        return source.new_empty(shape)


def _launch(
    name: str,
    connection: Connection,
    source: Tensor,
    result: Tensor,
    start: Callable[[], Sequence[Work]],
    bytes_sent: int,
    bytes_received: int,
    to_host: bool = False,
) -> Transfer[Tensor]:
    lane, on_cpu = current_lane(), source.device.type == "cpu"
    stream_ordered = not on_cpu and connection.is_stream_ordered(source.device)
    copied_to_host = to_host and stream_ordered
    if copied_to_host:
        check_not_capturing(name)
    keep, arrived = [source, result], result
    with nullcontext() if lane is None or not lane.asynchronous else on_comm_stream():
        works = start()
        if stream_ordered and (lane is not None or copied_to_host):
            for work in works:
                work.wait()
            works = [_CarriedWork(work) for work in works]
        if copied_to_host:
            arrived = host_like(result).copy_(result, non_blocking=True)
            keep.append(arrived)
            works = [CopiedWork(mark_copied(source.device, lane))]
    return Transfer(
        name,
        works,
        lambda: arrived,
        connection=connection,
        stream_ordered=stream_ordered and not copied_to_host,
        keep=keep,
        bytes_sent=bytes_sent,
        bytes_received=bytes_received,
    )


class _CarriedWork:
    """A work that the lane's communication stream already waits for. Waiting for that stream is enough."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: object = None) -> bool:
        return True


Map = Callable[[Tensor], Tensor]


def differentiable(x: Tensor, run: Map, transpose: Map) -> Tensor:
    """`run(x)`, with a gradient if `x` needs one. In a lane gradients are not supported, and `run` refuses.

    Args:
        run: a collective along the first dimension, or on all elements alike.
        transpose: the collective that maps a gradient of `run(x)`'s shape to one of `x`'s shape.
    """
    if current_lane() is None and ((x.requires_grad and torch.is_grad_enabled()) or function_transform() is not None):
        return _applied(x, run, transpose)
    return run(x)


def _applied(x: Tensor, run: Map, transpose: Map) -> Tensor:
    return cast("Tensor", _Collective.apply(x, run, transpose))  # type: ignore[no-untyped-call]


class _Collective(torch.autograd.Function):
    """Gradients of collectives.

    A collective is a linear map of all ranks' inputs, so its transpose computes the gradients.

        all_reduce         every rank gets the sum             all_reduce of the gradients
        all_gather         every rank gets every block         reduce_scatter: the sum over ranks of one's own block
        reduce_scatter     a rank gets its block of the sum    all_gather
        all_to_all         ranks exchange blocks                 all_to_all with the split sizes swapped

    So a rank's gradient is the gradient of the sum of all ranks' losses, as with `torch.distributed.nn`. The
    transpose of a transpose is the map itself, which gives second-order gradients; a linear map applied to a
    tangent gives forward-mode gradients.

    Autograd may run the transpose in its own thread (on CUDA), which has none of the caller's contextvars. The only
    one needed, the connection that leads the step, is passed along.
    """

    @staticmethod
    def forward(x: Tensor, run: Map, transpose: Map) -> Tensor:
        return run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Map, Map], output: Tensor) -> None:
        _, ctx.run, ctx.transpose = inputs
        ctx.leader = leading_connection()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        with lead_again(ctx.leader):
            return _applied(grad, ctx.transpose, ctx.run), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _applied(tangent, ctx.run, ctx.transpose)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], x: Tensor, run: Map, transpose: Map) -> tuple[Tensor, int]:
        """The batch dimension becomes the last dimension."""
        return _applied(x.movedim(in_dims[0], -1), run, transpose), -1
