"""Turns waits inside torch into points, for modules that call torch's own collectives.

torch's own tensor and expert parallelism (`parallelize_module`, DTensor, functional collectives) launches a collective
and waits for it where its result is first used. Inside `intercepting()`, a lane that reaches such a wait hands the
baton on first:

    y = down(x)            all_reduce is launched                    <- noted as a transfer of the lane
    h = h + y              the result is needed: point "collective"  -> the other lanes compute
                           wait for it                               <- the baton is back

`torch.distributed.all_reduce` normally waits at once. In a lane it is launched, and its wait also becomes a point:
transformers sums the outputs of row-parallel layers with it.

Outside lanes nothing changes. All other collectives go through `torch.distributed._functional_collectives`; its
functions are replaced inside `intercepting()` and restored when the last such block ends.

Limit: torch waits without watching the peers. A failed peer is noticed only when the lane has held the baton for
`timeout_s` (`UBatchTimeout`), and its error is not reported.

Under `torch.inference_mode()` torch 2.13 multiplies by a sharded linear layer after gathering its *weight*. That is
torch's choice, and slow; under `torch.no_grad()` it sends activations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ubatch.dbo import dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from ubatch.errors import GradientError
from ubatch.lanes.context import UBatchContext, check_voted, current_lane
from ubatch.process.interrupts import Patches, Replacement, changing
from ubatch.ranks.transfer import Transfer
from ubatch.schedules.schedule import Point

_torch_waits: Callable[[Tensor], Tensor] = functional.wait_tensor
_torch_reduces: Callable[..., Any] = dist.all_reduce


class _TorchWork:
    """A running collective of torch's. It counts as completed only after a wait; a second wait returns at once."""

    def __init__(self, result: Tensor) -> None:
        self._result: Tensor | None = result

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return self._result is None

    def wait(self, timeout: Any = None) -> object:
        """Wait in torch, which does not watch peers and ignores `timeout`; the baton's time-out applies meanwhile."""
        result, self._result = self._result, None
        return None if result is None else _torch_waits(result)


_under_way: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Result -> its work and transfer, for results that were not yet waited for."""
_launching: ContextVar[bool] = ContextVar("ubatch_launching_in_torch", default=False)


def intercepting() -> AbstractContextManager[None]:
    """Turn torch's waits into points in the `with` block; may be nested, also from several threads."""
    return _patches.applied()


def _replacements() -> Iterator[Replacement]:
    yield functional, "wait_tensor", _torch_waits, _wait_tensor
    for name in _launchers():
        function = getattr(functional, name)
        yield functional, name, function, _noted(name, function)
    yield dist, "all_reduce", dist.all_reduce, _all_reduce


_patches = Patches(_replacements)


@functools.cache
def _launchers() -> tuple[str, ...]:
    """Names of the public functions that launch: they take a group and return a tensor to wait for."""
    return tuple(
        name
        for name, function in inspect.getmembers(functional, inspect.isfunction)
        if function.__module__ == functional.__name__
        and not name.startswith("_")
        and not name.endswith("_inplace")
        and "group" in inspect.signature(function).parameters
    )


def _noted(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `launch`, so that its results are noted as transfers of the calling lane."""
    signature = inspect.signature(launch)

    @functools.wraps(launch)
    def noted(*args: Any, **kwargs: Any) -> Any:
        lane = current_lane()
        if lane is None or _launching.get():
            return launch(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        inputs = _tensors(next(iter(arguments.values())))
        _check(lane, name, inputs, arguments["group"])
        dbo_maybe_run_recv_hook()
        with changing(_launching, True):
            results = launch(*args, **kwargs)
        for result, sent in zip(_tensors(results), inputs, strict=True):
            if isinstance(result, functional.AsyncCollectiveTensor):  # else torch has waited for it already
                _under_way[result.elem] = _transfer(name, result.elem, sent.nbytes)
        return results

    return noted


def _tensors(value: Any) -> Sequence[Tensor]:
    return value if isinstance(value, list | tuple) else [value]


def _transfer(name: str, arriving: Tensor, bytes_sent: int) -> tuple[_TorchWork, Transfer[None]]:
    work = _TorchWork(arriving)
    return work, Transfer(name, [work], lambda: None, bytes_sent=bytes_sent, bytes_received=arriving.nbytes)


def _wait_tensor(tensor: Tensor) -> Tensor:
    work, transfer = _under_way.pop(tensor, (None, None))
    if current_lane() is None:
        if work is None:
            return _torch_waits(tensor)
        work.wait()
        return tensor
    if transfer is None:  # launched by a torch function that also waits
        _, transfer = _transfer("collective", tensor, tensor.nbytes)
    dbo_register_recv_hook(transfer.wait)
    dbo_yield(Point.COLLECTIVE)
    transfer.wait()
    return tensor


@functools.wraps(_torch_reduces)
def _all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    lane = current_lane()
    if lane is None or async_op:  # with async_op the caller waits for the work itself
        return _torch_reduces(tensor, op, group, async_op)
    _check(lane, "all_reduce", [tensor], dist.group.WORLD if group is None else group)
    dbo_maybe_run_recv_hook()
    work = _torch_reduces(tensor, op, group, True)
    if work is not None:  # None: this rank is not in the group
        size = tensor.nbytes
        transfer = Transfer("all_reduce", [work], lambda: None, keep=[tensor], bytes_sent=size, bytes_received=size)
        dbo_register_recv_hook(transfer.wait)
        dbo_yield(Point.COLLECTIVE)
        transfer.wait()
    return None


def _check(lane: UBatchContext, name: str, inputs: Sequence[Tensor], group: Any) -> None:
    """Refuse, before the launch, a collective that could dead-lock or lose gradients."""
    if any(tensor.requires_grad for tensor in inputs):
        raise GradientError(
            f"torch's {name} in lane {lane.id} got a tensor that requires grad. Run under torch.no_grad() or "
            "torch.inference_mode(); training with collectives runs unsplit."
        )
    process_group = dist.distributed_c10d._resolve_process_group(functional._resolve_group_name(group))
    check_voted(lane, dist.get_process_group_ranks(process_group), f"torch's {name}")
