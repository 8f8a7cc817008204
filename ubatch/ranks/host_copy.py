"""Copy small tensors to the host without waiting for all work queued on the device.

`tensor.tolist()` on CUDA waits for everything in the current stream, other lanes' compute included. A copy on the
communication stream waits for that stream's work, and for compute queued before the copy was launched:

    counts = launch_all_to_all_single(..., to_host=True)      the result is in host memory, pinned
    mine = copy_to_host(sent)                                 so is this one; both copies run at once
    ... launch more compute ...
    sizes = counts.wait().tolist()                            waits for these bytes only, and watches for dead peers
"""

import time
from datetime import timedelta

import torch
from torch import Tensor

from ubatch.dbo import on_comm_stream
from ubatch.errors import ConfigError
from ubatch.lanes.context import UBatchContext, current_lane
from ubatch.ranks.group import CommGroup
from ubatch.ranks.transfer import Transfer
from ubatch.streams.graph_protocols import capturing
from ubatch.streams.streams import Event, mark_now

_SPIN_S = 200e-6
"""Seconds to poll before sleeping. Counts usually arrive within tens of microseconds; a sleep takes longer."""
_SLEEP_S = 50e-6


class CopiedWork:
    """Copies to the host, with the interface of a transport's work. They are done when the event after them is.

    Args:
        copied: event recorded after the copies.
    """

    def __init__(self, copied: Event) -> None:
        self._copied = copied

    def is_completed(self) -> bool:
        """Whether the copies have arrived."""
        return self._copied.query()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the copies have arrived.

        Raises:
            RuntimeError: not within `timeout`.
        """
        if timeout is None:
            self._copied.synchronize()
            return True
        begun = time.monotonic()
        while not self._copied.query():
            waited = time.monotonic() - begun
            if waited > timeout.total_seconds():
                raise RuntimeError("the copy to the host has not arrived yet")
            if waited > _SPIN_S:
                time.sleep(_SLEEP_S)
        return True


def copy_to_host(*tensors: Tensor, group: CommGroup | None = None, name: str = "to_host") -> Transfer[list[Tensor]]:
    """Copy small tensors to host memory; tensors already on the host are returned as they are.

    Args:
        tensors: on one device, complete in the current stream's order; not written before the wait.
        group: its peers are watched while the host waits: those that the communication stream waits for.
        name: for traces and errors.

    Raises:
        ConfigError: a graph is being captured; the host cannot read results then.
    """
    lane = current_lane()
    if not tensors[0].is_cuda and (lane is None or not lane.asynchronous):
        return Transfer.ready(list(tensors), name)
    check_not_capturing(name)
    with on_comm_stream():
        copies = [host_like(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]
        work = CopiedWork(mark_copied(tensors[0].device, lane))
    connection = None if group is None else group.usable_connection()
    return Transfer(name, (work,), lambda: copies, connection=connection, keep=(*tensors, *copies)).off_link()


def host_like(tensor: Tensor) -> Tensor:
    """An empty host tensor like `tensor`; pinned if `tensor` is on CUDA."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def mark_copied(device: torch.device, lane: UBatchContext | None) -> Event:
    """Record an event on the current stream for the host: the lane's existing event, or a new one outside lanes."""
    return mark_now(device) if lane is None else lane.mark_copied()


def check_not_capturing(name: str) -> None:
    """Refuse a host read during a graph capture."""
    if capturing():
        raise ConfigError(
            f"{name!r}: the host reads what the device computes, which no captured graph can do. Use a transport that "
            "can be captured (traits.capturable)."
        )
