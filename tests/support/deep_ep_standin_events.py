"""Events, streams and the order of calls, for `deep_ep_standin`.

DeepEP's asynchronous calls run on a stream of its own. Where a test has put a device in `place.device` (a `FakeCuda`
with a stream `deep_ep`), they do here: after the event they were given, and before the one they return. The data are
there at once then, and the device says whether anybody reads them too early. Without a device they arrive when somebody
waits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from fake_graphs import run_kernel
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ubatch import dbo_current_ubatch_id

calls: list[tuple[str, int, int]] = []
place = SimpleNamespace(device=None, patience_s=60.0, node=8)
"""`patience_s`: how long a kernel waits for a peer before it fails; DeepEP's waits 100 s, and then ends the process.
`node`: ranks of a node, as many as DeepEP was compiled for."""
_numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()
_next_number = count()


def require(condition: object, what: str) -> None:
    """The stand-in's `EP_HOST_ASSERT`."""
    if not condition:
        raise AssertionError(f"DeepEP would fail: {what}")


def note(what: str, buffer: object) -> None:
    """Buffers are numbered in the order in which they were made; the stand-in keeps none of them."""
    if buffer not in _numbers:
        _numbers[buffer] = next(_next_number)
    calls.append((what, dbo_current_ubatch_id(), _numbers[buffer]))


def receive(work: Any) -> None:
    """Wait for what a peer sends."""
    work.wait(timedelta(seconds=place.patience_s))


class EventHandle:
    """A mark in the current stream."""

    def __init__(self) -> None:
        calls.append(("capture", dbo_current_ubatch_id(), -1))
        self.arrive: Callable[[], None] | None = None
        self._mark: Any = None
        self.record()

    def record(self) -> None:
        if place.device is not None:
            self._mark = place.device.new_event()
            self._mark.record(place.device.current())

    def current_stream_wait(self) -> None:
        arrive, self.arrive = self.arrive, None
        if arrive is not None:
            arrive()
        if self._mark is not None:
            self._mark.wait(place.device.current())


class EventOverlap:
    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        require(self.event is not None, "waited for an event of a synchronous call")
        assert self.event is not None
        self.event.current_stream_wait()


class Launch:
    """A call while it is made."""

    def __init__(self, name: str, asynchronous: bool) -> None:
        self._name = name
        self._asynchronous = asynchronous

    def kernel(self, run: Callable[[], None], used: Sequence[Tensor | None]) -> None:
        """Run what a launch does at once; a graph that is captured replays it."""
        run_kernel(self._name, run, [tensor for tensor in used if tensor is not None])

    def finished(
        self, arrive: Callable[[], None], reads: Sequence[Tensor | None], writes: Sequence[Tensor | None]
    ) -> EventOverlap:
        """The event of the call.

        Args:
            arrive: makes the data be there.
            reads, writes: what its kernels read, and what they have made.
        """
        if not self._asynchronous:
            self.kernel(arrive, [*reads, *writes])
            return EventOverlap(None)
        event = EventHandle.__new__(EventHandle)
        event.arrive, event._mark = arrive, None
        if place.device is not None:
            arrive()
            event.arrive = None
            place.device.deep_ep_kernel(self._name, *([t for t in each if t is not None] for each in (reads, writes)))
            event.record()
        return EventOverlap(event)


@contextmanager
def launched(
    name: str, previous: EventHandle | None, asynchronous: bool, allocate_on_comm_stream: bool
) -> Iterator[Launch]:
    """A call, on DeepEP's stream where a device is there."""
    if allocate_on_comm_stream:
        require(previous is not None and asynchronous, "allocate_on_comm_stream needs previous_event and asynchrony")
    if previous is not None:
        require(allocate_on_comm_stream, "behind an older event, memory of the compute stream may still be in use")
        require(isinstance(previous, EventHandle), "an EventHandle, not an EventOverlap")
    device = place.device
    if device is None or not asynchronous:
        yield Launch(name, asynchronous)
        return
    outside = device.current()
    device.set_current(device.deep_ep)
    try:
        assert previous is not None
        previous.current_stream_wait()
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._C.DisableTorchFunction())
            yield Launch(name, asynchronous)
    finally:
        device.set_current(outside)
