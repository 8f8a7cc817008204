"""The streams of a step: the work of each stream, and what it waits for.

    upload     the step's small inputs, from pinned memory                  waits for nothing
    forward    resolve, attention plans, model, logits, sampling, store     waits for its uploads, and for the work
                                                                            queued on the caller's stream before
    download   the sampled tokens, to pinned memory                         waits for the sampling it copies

    caller     the scheduling thread's own stream                           waits for nothing

    upload     in N ........ in N+1 ................
    forward    -- step N ---------|-- step N+1 -----|--
    download                      out N ............. out N+1
    host       launch N+1 | ..... read N | launch N+2 | .....

So step N+1 is launched while step N runs, its inputs have arrived when step N ends, and reading step N delays neither.
The host waits in two places: in `HostCopy.wait`, to read a step, and in `planning`, for the copies of the previous
plan. With several ranks it checks for failed peers while it waits: a collective without all its ranks never ends.

Ownership across streams: the allocator reuses a freed tensor's memory in the order of the stream that made it, even if
another stream still uses it. So a tensor that another stream uses is held here until an event shows that this stream is
done:

    uploaded tensors      made on upload, read on forward      until the block that used them is done (`keep`)
    downloaded tensors    made on forward, read on download    until the copy is done
    pinned buffers        written again by the host            after the copy that reads them is done, or the host has
                                                               read their content; staged ones, from which a library
                                                               copies, after the block is done

All other tensors of a step are made and freed on the forward stream, in its order. Only one thread uses these objects.

On a CPU there is nothing to order, and all of this is skipped. Source: the overlap scheduler of SGLang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from torch import Tensor

from ubatch import CommGroup, GroupBroken, PeerFailed, TransferTimeout
from ubatch.ranks import CopiedWork
from ubatch.streams import Event, HostCopy, NullStreams, Packing, StreamBackend, carried_by, make_streams

_SMALLEST_BUFFER = 4096


class StepStreams:
    """The forward, upload and download streams of one runner.

    Args:
        group: ranks of the steps' collectives.

    Attributes:
        asynchronous: whether the device has streams; False on a CPU.

    Raises:
        ConfigError: see `ubatch.make_streams`.
    """

    def __init__(
        self, device: torch.device, streams: StreamBackend | None = None, group: CommGroup | None = None
    ) -> None:
        self.device = device
        self._group = group if group is not None and group.size > 1 else None
        self._streams = make_streams(device) if streams is None else streams
        self.asynchronous = not isinstance(self._streams, NullStreams)
        new = self._streams.new_stream
        self._forward, self._upload, self._download = new(), new(), new()
        self._asked, self._made, self._planned = (self._streams.new_event() for _ in range(3))
        self._events = _Events(self._streams.new_event)
        self._pinned = PinnedBuffers(pin=device.type == "cuda")
        # Objects and buffers held for the current block; then for blocks, and for copies, that may still be running.
        self._block: list[object] = []
        self._staged: list[Tensor] = []
        self._blocks: deque[tuple[Event, list[object], list[Tensor]]] = deque()
        self._downloads: deque[HostCopy] = deque()
        self._running = False

    # -- blocks -------------------------------------------------------------------------------------------------

    def forward(self, *, join: bool = False) -> AbstractContextManager[None]:
        """Run the `with` block on the forward stream, after the work queued on the caller's stream so far.

        Inside, `to_device` and `to_host` use the other two streams. A nested block is part of the outer one.

        Args:
            join: let the caller's stream wait for the end of the block, so that the caller may use its results.
        """
        if not self.asynchronous or self._running:
            return nullcontext()
        return self._run(join)

    @contextmanager
    def _run(self, join: bool) -> Iterator[None]:
        streams = self._streams
        self._let_go()
        caller = streams.current()
        self._asked.record(caller)
        self._asked.wait(self._forward)
        streams.set_current(self._forward)
        self._running = True
        try:
            with carried_by(self):
                yield
        finally:
            self._running = False
            streams.set_current(caller)
            block, self._block = self._block, []
            staged, self._staged = self._staged, []
            done = self._events.new()
            done.record(self._forward)
            if join:
                done.wait(caller)
            self._blocks.append((done, block, staged))

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Context for planning attention, inside a `forward` block.

        Back ends write their plan to a host buffer, and queue a copy of it to the device; the next plan uses the same
        buffer. So the host waits here until the previous plan's copies are done. They run before the previous step's
        forward, so this wait does not delay the overlap loop.
        """
        if not self.asynchronous:
            yield
            return
        self._await(self._planned)
        try:
            yield
        finally:
            self._planned.record(self._streams.current())

    def keep(self, *objects: object) -> None:
        """Hold objects of other streams that the current block uses, until the block is done on the device."""
        if self.asynchronous:
            self._block += objects

    def close(self) -> bool:
        """Wait for all queued work; its tensors may be freed afterwards. The streams may be used again.

        Returns:
            Whether all work has ended. If the group is broken (already reported), it is not waited for: work that waits
            for a peer may never end.
        """
        if not self.asynchronous:
            return True
        with suppress(PeerFailed, GroupBroken, TransferTimeout):
            for stream in (self._upload, self._forward, self._download):
                self._made.record(stream)
                self._await(self._made)
            self._let_go()
            return True
        return False

    def _await(self, event: Event) -> None:
        """Make the host wait for an event."""
        if self._group is None:
            event.synchronize()
        else:
            self._group.usable_connection().wait_for_works((CopiedWork(event),), "the device's part of a step")

    def _let_go(self) -> None:
        """Release everything that the device no longer uses."""
        while self._blocks and self._blocks[0][0].query():
            done, _, staged = self._blocks.popleft()
            self._events.again(done)
            for buffer in staged:
                self._pinned.give(buffer)
        while self._downloads and self._downloads[0].done():
            self._downloads.popleft()

    # -- copies -------------------------------------------------------------------------------------------------

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Carrier`; in a block only."""
        streams, reader = self._streams, self._streams.current()
        packing = Packing.of(tensors)
        staged = self._pinned.take(packing.nbytes)
        packing.write(staged, tensors)
        arrived = self._events.new()
        streams.set_current(self._upload)
        try:
            there = torch.empty(packing.nbytes, dtype=torch.uint8, device=self.device)
            there.copy_(staged[: packing.nbytes], non_blocking=True)
            arrived.record(self._upload)
        finally:
            streams.set_current(reader)
        arrived.wait(reader)
        self.keep(there)
        self._pinned.lend(staged, arrived, self._events.again)
        return packing.read(there)

    def stage(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Carrier`; in a block only."""
        packing = Packing.of(tensors)
        buffer = self._pinned.take(packing.nbytes)
        packing.write(buffer, tensors)
        self._staged.append(buffer)
        return packing.read(buffer)

    def download(self, tensor: Tensor) -> HostCopy:
        """See `Carrier`."""
        streams, maker = self._streams, self._streams.current()
        buffer = self._pinned.take(tensor.nbytes)
        host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        arrived = self._events.new()
        self._made.record(maker)
        self._made.wait(self._download)
        streams.set_current(self._download)
        try:
            host.copy_(tensor, non_blocking=True)
            arrived.record(self._download)
        finally:
            streams.set_current(maker)

        def over(_: Tensor, event: Event) -> None:
            self._pinned.give(buffer)
            self._events.again(event)

        copy = HostCopy(host, arrived, tensor, self._await, over)
        self._downloads.append(copy)
        return copy


class PinnedBuffers:
    """A pool of pinned host buffers, because pinning takes longer than a step.

    Args:
        pin: whether to pin; not possible without a GPU.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._free: list[Tensor] = []
        self._lent: deque[tuple[Event, Tensor, Callable[[Event], None]]] = deque()

    @torch.inference_mode(False)  # inference tensors cannot be written outside inference mode
    def take(self, nbytes: int) -> Tensor:
        """A free buffer of at least `nbytes` bytes, uint8. Return it by `lend` or `give`."""
        while self._lent and self._lent[0][0].query():
            event, buffer, over = self._lent.popleft()
            self._free.append(buffer)
            over(event)
        fitting = [index for index, buffer in enumerate(self._free) if buffer.nbytes >= nbytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda index: self._free[index].nbytes))
        size = max(_SMALLEST_BUFFER, 1 << max(0, nbytes - 1).bit_length())
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)

    def lend(self, buffer: Tensor, until: Event, over: Callable[[Event], None]) -> None:
        """Return a buffer with a queued copy: it is free again after the event `until`, and then `over(until)` runs."""
        self._lent.append((until, buffer, over))

    def give(self, buffer: Tensor) -> None:
        """Return a buffer that no copy uses."""
        self._free.append(buffer)


class _Events:
    """A pool of events, because making one costs more than recording it."""

    def __init__(self, make: Callable[[], Event]) -> None:
        self._make = make
        self._free: list[Event] = []

    def new(self) -> Event:
        return self._free.pop() if self._free else self._make()

    def again(self, event: Event) -> None:
        self._free.append(event)
