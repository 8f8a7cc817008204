"""Fake streams with lanes that run on them, and lanes in the shape of the MoE kernel and of the switching points.

And a fake device with lanes on it, and lanes that exchange tensors they do not hold on to.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from fake_cuda import FakeCuda
from fake_streams import FakeStreams, Operation
from lanes import EVERY_POINT, FinishedWork, run
from torch import Tensor

from ubatch import Point, Schedule, SharedExpert, Transfer, current_schedule, dbo_current_ubatch_id, dbo_yield
from ubatch.dbo import (
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
    on_comm_stream,
)
from ubatch.lanes.workers import LanePool

CPU = torch.device("cpu")
Body = Callable[[], Any]


class Streams(FakeStreams):
    """Fake streams, and the lanes that run on them."""

    def __init__(self) -> None:
        super().__init__()
        self.pools: dict[int, LanePool] = {}

    def run(self, *bodies: Callable[[], Any], schedule: Schedule = EVERY_POINT) -> list[Any]:
        """One step."""
        lanes = len(bodies)
        if lanes not in self.pools:
            self.pools[lanes] = LanePool(lanes, CPU, 20.0, self)
        return run(self.pools[lanes], *bodies, schedule=schedule)

    def launch(self, name: str, *, reads: str, writes: str) -> Transfer[Operation]:
        """A transfer; whoever waits for it unpacks what arrived."""
        with on_comm_stream():
            self.work(name, reads=[reads], writes=[f"packed {writes}"])
        transfer: Transfer[None] = Transfer(name, [FinishedWork()], lambda: None)
        return transfer.map(lambda _: self.work(f"unpack {name}", reads=[f"packed {writes}"], writes=[writes]))

    def waited_for_by(self, name: str) -> list[str]:
        """What operation `name` waits for."""
        operation = next(each for each in self.operations if each.name == name)
        return [each.name for each in self.operations if each in operation.waits]


def opened_streams() -> Iterator[Streams]:
    """Streams for a fixture; the threads of their lanes end with the test."""
    streams = Streams()
    yield streams
    for pool in streams.pools.values():
        pool.close()


def model(fake: Streams, layers: int = 3) -> Callable[[], None]:
    """A lane with the points, transfers and buffers of the MoE kernel; buffers are used again in every layer."""

    def body() -> None:
        for layer in range(layers):
            run_layer(fake, dbo_current_ubatch_id(), layer, current_schedule().shared_expert)

    return body


def run_layer(fake: Streams, lane: int, layer: int, shared_expert_at: SharedExpert) -> None:
    """One layer of one lane."""

    def compute(what: str, reads: Sequence[str], writes: str) -> None:
        own = [f"{buffer}{lane}" for buffer in reads]
        fake.work(f"{what} {lane}.{layer}", reads=own, writes=[f"{writes}{lane}"])

    def launch(what: str, reads: str, writes: str) -> Transfer[Operation]:
        return fake.launch(f"{what} {lane}.{layer}", reads=f"{reads}{lane}", writes=f"{writes}{lane}")

    def shared_expert(place: SharedExpert) -> None:
        if place is shared_expert_at:
            compute("shared", ["x"], "shared")

    compute("prepare", ["h"], "q")
    dbo_yield(Point.ATTN_PREPARE)
    compute("attention", ["q"], "x")
    dbo_yield(Point.SELECT)
    dbo_maybe_run_recv_hook()
    compute("pack", ["x"], "rows")
    dispatch = launch("dispatch", "rows", "y")
    shared_expert(SharedExpert.DISPATCH)
    dbo_register_recv_hook(dispatch.wait)
    dbo_yield(Point.DISPATCH)
    dispatch.wait()
    compute("experts", ["y"], "z")
    dbo_maybe_run_recv_hook()
    combine = launch("combine", "z", "back")
    if shared_expert_at is SharedExpert.COMBINE_RETURN:
        dbo_yield(Point.COMBINE)
        shared_expert(SharedExpert.COMBINE_RETURN)
    else:
        shared_expert(SharedExpert.COMBINE)
        dbo_register_recv_hook(combine.wait)
        dbo_yield(Point.COMBINE)
    combine.wait()
    dbo_yield(Point.OUTPUT)
    compute("output", ["back", "shared"], "h")
    dbo_yield(Point.LAYER)


def switching(fake: Streams, layers: int = 3) -> Callable[[], None]:
    """A lane that launches between two points which switch streams, as vLLM's high-throughput transport does."""

    def body() -> None:
        lane = dbo_current_ubatch_id()
        for layer in range(layers):
            fake.work(f"write {lane}.{layer}", reads=[f"z{lane}"], writes=[f"x{lane}"])
            dbo_yield_and_switch_from_compute_to_comm()
            fake.work(f"send {lane}.{layer}", reads=[f"x{lane}"], writes=[f"y{lane}"])
            dbo_yield_and_switch_from_comm_to_compute()
            fake.work(f"read {lane}.{layer}", reads=[f"y{lane}"], writes=[f"z{lane}"])

    return body


# -- on a fake device --------------------------------------------------------------------------------------------------


class Lanes:
    """A fake device and pools of lanes on it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.pools: dict[tuple[int, float], LanePool] = {}

    def run(self, *bodies: Body, schedule: Schedule = EVERY_POINT, timeout_s: float = 20.0) -> list[Any]:
        key = len(bodies), timeout_s
        if key not in self.pools:
            self.pools[key] = LanePool(len(bodies), CPU, timeout_s)
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
