"""Checks before a collective is launched: after one rank has launched, an error would leave the others waiting."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from ubatch.errors import ConfigError, GradientError
from ubatch.lanes.ambient import function_transform
from ubatch.lanes.context import UBatchContext, check_voted, current_lane
from ubatch.ranks.connection import Connection, leading_connection
from ubatch.ranks.group import CommGroup, check_group

_FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


def check_launch(x: Tensor, group: CommGroup, launches: str | None = None) -> Connection:
    """Check a launch and return the connection to launch on. Also for transports with their own way to launch.

    Args:
        launches: name of the transfer, for `ubatch.ranks.launch_order`; None if another check with the name follows.

    Raises:
        ConfigError: `group` is not a `CommGroup`.
        GradientError: `x` requires grad, and a transfer has no gradient.
        UnvotedCollectiveError, GroupBroken: see `all_reduce`.
    """
    if type(group) is not CommGroup:
        check_group(group)
    lane = current_lane()
    transformed = _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    if transformed or torch.is_grad_enabled():
        _check_gradients(x, lane)
    if lane is not None and not lane.voted_ranks.issuperset(group.ranks):
        check_voted(lane, group.ranks, "a collective")
    connection = group._connection
    connection.check_usable()
    order = (leading_connection() or connection).order
    if order is not None and launches is not None:
        order.note(-1 if lane is None else lane.id, launches, x)
    return connection


def _check_gradients(x: Tensor, lane: UBatchContext | None) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        what = "requires grad"
    elif (transform := function_transform()) is not None and _is_transformed(x):
        what = f"belongs to {transform}"
    else:
        return
    if lane is not None:
        raise GradientError(
            f"a collective in lane {lane.id} got a tensor of shape {tuple(x.shape)} that {what}. "
            "Run under torch.no_grad() or torch.inference_mode(); training with collectives runs unsplit."
        )
    raise GradientError(
        f"a tensor of shape {tuple(x.shape)} that {what} was to be launched, but a transfer has no gradient. Use "
        "all_reduce, all_gather, reduce_scatter or all_to_all_single, which have one, or launch x.detach()."
    )


def _is_transformed(x: Tensor) -> bool:
    """Whether this tensor belongs to a function transform or to forward-mode gradients."""
    if _functorch.is_functorch_wrapped_tensor(x):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def check_summable(x: Tensor) -> None:
    """Refuse dtypes that no transport can sum.

    Raises:
        ConfigError: `x` has such a dtype.
    """
    if x.dtype in _FP8:
        raise ConfigError(f"{x.dtype} travels, but nobody sums it. Convert it first, for example to bfloat16.")


def rows_of(x: Tensor) -> int:
    """Number of rows of `x`.

    Raises:
        ConfigError: `x` is a 0-dim tensor.
    """
    if x.dim() == 0:
        raise ConfigError("a 0-dim tensor has no rows to send to other ranks. Give it a dimension: x.view(1).")
    return x.shape[0]


def block_sizes(x: Tensor, group: CommGroup, sizes: Sequence[int] | None, what: str) -> list[int]:
    """The rows of `x` for every rank: `sizes`, or equal blocks if None.

    Raises:
        ConfigError: the sizes do not sum to the rows of `x`. `what`: name of the sizes in the message.
    """
    rows = x.shape[0] if x.dim() else rows_of(x)
    if sizes is None:
        if rows % group.size:
            raise ConfigError(f"{rows} rows do not divide by {group.size} ranks; pad them, or give {what}.")
        return [rows // group.size] * group.size
    if len(sizes) != group.size or min(sizes) < 0 or sum(sizes) != rows:
        raise ConfigError(f"{what} {list(sizes)} must be {group.size} numbers, one per rank, that sum to {rows} rows.")
    return list(sizes)
