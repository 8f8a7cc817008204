"""A fake device with lanes on it, and lanes that exchange tensors they do not hold on to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fake_cuda import FakeCuda
from lanes import EVERY_POINT, FinishedWork, run
from torch import Tensor

from ubatch import Schedule, Transfer, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield, on_comm_stream
from ubatch.lanes.workers import LanePool

Body = Callable[[], Any]


class Lanes:
    """A fake device and pools of lanes on it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.pools: dict[tuple[int, float], LanePool] = {}

    def run(self, *bodies: Body, schedule: Schedule = EVERY_POINT, timeout_s: float = 20.0) -> list[Any]:
        key = len(bodies), timeout_s
        if key not in self.pools:
            self.pools[key] = LanePool(len(bodies), torch.device("cpu"), timeout_s)
        return run(self.pools[key], *bodies, schedule=schedule)


def opened_lanes() -> Iterator[Lanes]:
    """Lanes on a fake device for a fixture; their threads end with the test."""
    with FakeCuda().installed() as cuda:
        found = Lanes(cuda)
        yield found
        for pool in found.pools.values():
            pool.close()


def launch(x: Tensor, *, keep: bool = True) -> Transfer[Tensor]:
    """A copy on the communication stream, as a transport without a network makes it."""
    arrived = torch.empty_like(x)
    with on_comm_stream():
        arrived.copy_(x)
    return Transfer(
        "copy", [FinishedWork()], lambda: arrived, stream_ordered=True, keep=(x, arrived) if keep else (arrived,)
    )


def compute() -> Tensor:
    """What allocates on the compute stream and writes there at once."""
    return torch.ones(4) + 1


def exchange(*, hook: bool = True, keep: bool = True) -> Body:
    """Layers that launch what they do not hold on to."""

    def body() -> Tensor:
        x = compute()
        for _ in range(3):
            dbo_maybe_run_recv_hook()
            transfer = launch(x + 1, keep=keep)
            if hook:
                dbo_register_recv_hook(transfer.wait)
            compute()
            dbo_yield()
            x = transfer.wait() * 2
        return x

    return body
