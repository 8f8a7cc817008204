"""Modules, wrappers and devices for the tests of graphs: on a CPU through `FakeGraphs`, the same on CUDA."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from fake_graphs import FakeGraphs
from lanes import FinishedWork
from torch import Tensor, nn

from ubatch import (
    ForwardContext,
    ForwardMode,
    GraphBackend,
    Point,
    Transfer,
    UBatchConfig,
    UBatchSlice,
    UBatchWrapper,
    dbo_register_recv_hook,
    dbo_yield,
    get_forward_context,
    on_comm_stream,
)

WIDTH = 8


def travel(x: Tensor) -> Transfer[Tensor]:
    """Send `x` round the block: a copy on the communication stream."""
    arrived = torch.empty_like(x)
    with on_comm_stream():
        arrived.copy_(x)
    return Transfer("travel", [FinishedWork()], lambda: arrived, stream_ordered=True, keep=(x, arrived))


class Net(nn.Module):
    """Layers that send their activations away and compute with what arrives, with the points of an MoE layer."""

    def __init__(self, layers: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.factor = 1.0

    def forward(self, x: Tensor, residual: Tensor | None = None, double: bool = False) -> Tensor:
        for layer in self.layers:
            dbo_yield(Point.SELECT)
            sent = travel(torch.tanh(layer(x)))
            dbo_register_recv_hook(sent.wait)
            dbo_yield(Point.DISPATCH)
            x = x + sent.wait() * self.factor
            dbo_yield(Point.COMBINE)
        if residual is not None:
            x = x * residual
        return x * 2 if double else x


class Planned:
    """An attention plan's stand-in: what a graph reads at fixed addresses, replanned in place."""

    def __init__(self, rows: int, device: str = "cpu") -> None:
        self.weight = torch.ones(rows, 1, device=device)

    def replan(self, weight: float) -> None:
        self.weight.fill_(weight)


class PlannedNet(Net):
    """A net that also reads the plan of its forward context."""

    def forward(self, x: Tensor, residual: Tensor | None = None, double: bool = False) -> Tensor:
        context = get_forward_context()
        assert context is not None
        assert isinstance(context.attn_metadata, Planned)
        return super().forward(x * context.attn_metadata.weight, residual, double)


@dataclass
class Case:
    """A wrapper whose calls are replayed, and one of the same module whose calls never are.

    Attributes:
        fake: what captures on a CPU; None on CUDA.
    """

    wrapper: UBatchWrapper
    eager: UBatchWrapper
    fake: FakeGraphs | None
    device: str

    def x(self, rows: int, width: int = WIDTH) -> Tensor:
        return torch.randn(rows, width, device=self.device)


@contextmanager
def graphed(module: nn.Module | None = None, device: str = "cpu", **settings: Any) -> Iterator[Case]:
    """A module wrapped with graphs, in inference mode, with thresholds as low as they can be."""
    module = (Net() if module is None else module).eval().to(device)
    lanes = settings.get("num_ubatches", 2)
    low = {"dbo_decode_token_threshold": lanes, "dbo_prefill_token_threshold": lanes, "verify": "off"}
    config = UBatchConfig(**{**low, **settings})
    fake = FakeGraphs() if device == "cpu" else None
    given: GraphBackend | None = fake
    case = Case(UBatchWrapper(module, config, "full", graphs=given), UBatchWrapper(module, config), fake, device)  # type: ignore[arg-type]
    try:
        with torch.inference_mode():
            yield case
    finally:
        case.wrapper.close()
        case.eager.close()


def planned_context(*plans: Planned, rows: int, mode: ForwardMode = ForwardMode.DECODE) -> ForwardContext:
    """A context with one plan, or with lanes of equal size that have one each."""
    if len(plans) == 1:
        return ForwardContext(attn_metadata=plans[0], num_tokens=rows, mode=mode)
    size = rows // len(plans)
    pieces = [slice(lane * size, (lane + 1) * size) for lane in range(len(plans))]
    return ForwardContext(
        num_tokens=rows,
        mode=mode,
        ubatch_slices=tuple(UBatchSlice(piece, piece) for piece in pieces),
        lane_contexts=tuple(ForwardContext(attn_metadata=plan, num_tokens=size, mode=mode) for plan in plans),
    )


def lane_switches() -> dict[str, int]:
    """How often every lane's thread has gone to sleep, by its name; it cannot run without waking up and sleeping."""
    counts = {}
    for thread in threading.enumerate():
        if thread.name.startswith("ubatch-lane"):
            with open(f"/proc/self/task/{thread.native_id}/status", encoding="ascii") as status:
                lines = dict(line.split(":", 1) for line in status)
            counts[f"{thread.name} {thread.native_id}"] = int(lines["voluntary_ctxt_switches"])
    return counts


T = TypeVar("T")


def settled(read: Callable[[], T]) -> T:
    """What `read` gives once it stays the same: lanes let go of a step, and go to sleep, after the caller has it."""
    last = [read()]
    while len(last) < 3 or any(value != last[0] for value in last):
        time.sleep(0.1)
        last = [*last[-2:], read()]
    return last[0]


HAS_PROC = os.path.exists("/proc/self/task")


def memory(device: str) -> int:
    """Bytes of all tensors that live."""
    return settled(lambda: _memory(device))


def _memory(device: str) -> int:
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one per stream and thread; not all versions of torch free a graph's
        return torch.cuda.memory_allocated()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided:
            storages[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
    return sum(storages.values())
