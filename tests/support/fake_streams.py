"""Streams without a GPU: they log what is put on them, and know what has to happen before what.

Two relations between operations, both closed under "and so on":

    waits     what the streams and events make an operation wait for: earlier ones of its stream, and what was marked
              by an event that its stream waited for
    needs     what it has to wait for: earlier ones of its stream, whoever wrote what it reads or overwrites, and
              whoever read what it overwrites

`needs - waits` is a race. `waits - needs` costs overlap for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ubatch.dbo import dbo_current_ubatch_id, dbo_enabled


@dataclass(eq=False)
class Operation:
    """Work on a stream. Its place in `FakeStreams.operations` is when it was put there."""

    name: str
    stream: FakeStream
    lane: int | None
    waits: frozenset[Operation]
    needs: frozenset[Operation]

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False)
class FakeStream:
    """An in-order queue; `done` is what its next operation waits for, `needed` what it has to."""

    name: str
    done: frozenset[Operation] = frozenset()
    needed: frozenset[Operation] = frozenset()

    def __repr__(self) -> str:
        return self.name


class FakeEvent:
    """A mark in a stream; one that was never recorded makes nobody wait, as in CUDA."""

    def __init__(self, streams: FakeStreams) -> None:
        self._streams = streams
        self._marked: frozenset[Operation] = frozenset()

    def record(self, stream: Any) -> None:
        self._marked = stream.done
        self._streams.note("record", stream)

    def wait(self, stream: Any) -> None:
        stream.done |= self._marked
        self._streams.note("wait", stream)

    def query(self) -> bool:
        return self._marked <= self._streams.host

    def synchronize(self) -> None:
        self._streams.host |= self._marked


@dataclass
class _Buffer:
    """Who wrote it last, and who has read it since."""

    writer: Operation | None = None
    readers: list[Operation] = field(default_factory=list)


class FakeStreams:
    """A `StreamBackend`. The caller's stream is called compute, the first new one comm.

    Attributes:
        log: "lane verb stream", in order; operations are logged by their name.
        operations: all work, in the order in which it was put on streams.
        races: "reader reads buffer, which nothing orders after writer", and so on.
        host: what the host has seen to be done; all that it queues from then on comes after that.
    """

    def __init__(self) -> None:
        self.compute = FakeStream("compute")
        self.comm = FakeStream("comm")
        self.log: list[str] = []
        self.operations: list[Operation] = []
        self.races: list[str] = []
        self.host: frozenset[Operation] = frozenset()
        self.warm: set[int] = set()
        self._current = threading.local()
        self._buffers: dict[str, _Buffer] = {}

    # -- the protocol -------------------------------------------------------------------------------------------

    def current(self) -> FakeStream:
        stream: FakeStream = getattr(self._current, "stream", self.compute)
        return stream

    def set_current(self, stream: Any) -> None:
        if stream is not self.current():
            self.note("switch", stream)
        self._current.stream = stream

    def new_stream(self) -> FakeStream:
        return self.comm

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    def warm_up(self) -> None:
        self.warm.add(threading.get_ident())

    def sm_count(self) -> int:
        return 0

    # -- what tests put on streams, and ask ---------------------------------------------------------------------

    def note(self, verb: str, stream: FakeStream) -> None:
        """Log what happened to a stream."""
        who = f"{dbo_current_ubatch_id()} " if dbo_enabled() else ""
        self.log.append(f"{who}{verb} {stream}")

    def work(self, name: str, *, reads: Iterable[str] = (), writes: Iterable[str] = ()) -> Operation:
        """Put work on the calling thread's current stream, and check that it may touch what it touches."""
        stream = self.current()
        stream.done |= self.host
        conflicts: list[tuple[Operation, str]] = []
        for each in reads:
            buffer = self._buffer(each)
            if buffer.writer is not None:
                conflicts.append((buffer.writer, f"{name} reads {each}, which nothing orders after {buffer.writer}"))
        for each in writes:
            buffer = self._buffer(each)
            others = [*buffer.readers, *([buffer.writer] if buffer.writer is not None else [])]
            conflicts += [(other, f"{name} writes {each}, which nothing orders after {other}") for other in others]
        self.races += [race for other, race in conflicts if other not in stream.done]

        needs = stream.needed.union(*(other.needs | {other} for other, _ in conflicts))
        lane = dbo_current_ubatch_id() if dbo_enabled() else None
        operation = Operation(name, stream, lane, stream.done, needs)
        stream.done |= {operation}
        stream.needed = needs | {operation}
        self.operations.append(operation)
        self.log.append(f"{name} on {stream}")
        for each in reads:
            self._buffer(each).readers.append(operation)
        for each in writes:
            self._buffers[each] = _Buffer(operation)
        return operation

    def excess(self) -> dict[str, list[str]]:
        """Operation to what it waits for without need. Empty is best."""
        found = {
            each.name: [other.name for other in self.operations if other in each.waits - each.needs]
            for each in self.operations
        }
        return {name: others for name, others in found.items() if others}

    def _buffer(self, name: str) -> _Buffer:
        return self._buffers.setdefault(name, _Buffer())
