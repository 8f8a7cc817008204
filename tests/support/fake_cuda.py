"""A CUDA device that is not there: real modules run on the CPU, and every operation is checked as if on streams.

A dispatch mode in every lane's thread (and in the caller's) sees each operation of the real transports, kernels and
models, puts it on the thread's current fake stream, and asks two questions:

    race        does it come after whoever wrote what it reads or overwrites, and after whoever read what it overwrites?
                A kernel that waits on the device for another one's signals comes after that one in what it reads behind
                them; everything else it touches must be ordered by streams, as if there were no signals.
    lifetime    does it come after every use of the memory that it touches by an earlier tensor? The allocator hands a
                freed block to the next allocation of the same stream, so a tensor's memory may have been that of any
                tensor that was allocated on its stream and freed before it was made.

"Comes after" is what streams and events order, and what the host has waited for. It is kept as clocks: per stream, how
many of its operations are covered. Collectives run on a stream of their own, as NCCL's do, over the gloo underneath.
Memory is told apart by storage: two views of one tensor are one thing.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fake_cuda_modes import FakeCollectives, HostReads, Operations, merge, watched_kernels
from repository import ROOT, TESTS
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ubatch import CommGroup, dbo_current_ubatch_id, dbo_enabled, wrapped
from ubatch.lanes import workers
from ubatch.lanes.crew import Job
from ubatch.ranks import Connection, collectives, host_copy, ways
from ubatch.ranks.ways import Way, way_of
from ubatch.wrapping import eligibility

Clock = dict[str, int]


@dataclass(frozen=True)
class Use:
    """An operation: the `number`-th of its stream."""

    name: str
    stream: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} on {self.stream}"


class FakeCudaStream:
    """An in-order queue; `clock` is what its next operation comes after, its own operations included."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {name: 0}

    def __repr__(self) -> str:
        return self.name


class FakeCudaEvent:
    """A mark in a stream. The device is one query behind: the first one after a record says no."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._marked: Clock = {}
        self._asked = False

    def record(self, stream: Any) -> None:
        self._marked, self._asked = dict(stream.clock), False

    def wait(self, stream: Any) -> None:
        merge(stream.clock, self._marked)

    def query(self) -> bool:
        if self._asked:
            self.synchronize()
        self._asked = True
        return _covers(self._cuda.host, self._marked)

    def synchronize(self) -> None:
        merge(self._cuda.host, self._marked)


@dataclass
class _Memory:
    """A storage: where it was allocated, who wrote and read it, and what used its memory before."""

    name: str
    stream: str
    before: dict[str, Use]
    writer: Use | None = None
    earlier_writer: Use | None = None
    readers: dict[str, Use] = field(default_factory=dict)
    uses: dict[str, Use] = field(default_factory=dict)
    touched_by: set[str] = field(default_factory=set)
    on_host: bool = False


class FakeCuda:
    """A `StreamBackend` and the checker behind it. Use `installed`.

    Attributes:
        races, lifetimes: what is wrong, a sentence each; both must be empty.
        syncs: where the host waited, in a lane, for a whole stream: "tolist in moe/experts/torch_experts.py".
        counts: operations per stream.
        events: how many were made.
        signalled: of every kernel that waited for signals, whether only they ordered it after the one that set them:
            if a stream did, too, nothing overlapped.
        launching_async: a collective is being launched that somebody waits for later. Only the baton's holder does.
        host: what the host has seen to be done.
    """

    def __init__(self, sms: int = 132) -> None:
        self.compute, self.comm, self.nccl = (FakeCudaStream(name) for name in ("compute", "comm", "nccl"))
        self.races: list[str] = []
        self.lifetimes: list[str] = []
        self.syncs: list[str] = []
        self.signalled: list[bool] = []
        self.events = 0
        self.host: Clock = {}
        self.launching_async = False
        self._sms = sms
        self._thread = threading.local()
        self._memory: dict[int, _Memory] = {}
        self._freed: dict[str, dict[str, Use]] = {}
        self._made = 0

    @property
    def counts(self) -> Clock:
        return {stream.name: stream.clock[stream.name] for stream in (self.compute, self.comm, self.nccl)}

    # -- the protocol ---------------------------------------------------------------------------------------------

    def current(self) -> FakeCudaStream:
        stream: FakeCudaStream = getattr(self._thread, "stream", self.compute)
        return stream

    def set_current(self, stream: Any) -> None:
        self._thread.stream = stream

    def new_stream(self) -> FakeCudaStream:
        return self.comm

    def new_event(self) -> FakeCudaEvent:
        self.events += 1
        return FakeCudaEvent(self)

    def warm_up(self) -> None:
        pass

    def sm_count(self) -> int:
        return self._sms

    # -- operations -----------------------------------------------------------------------------------------------

    def operation(self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor], stream: FakeCudaStream) -> None:
        """Queue one operation on `stream` and check it."""
        lane = f"{dbo_current_ubatch_id()}: " if dbo_enabled() else ""
        merge(stream.clock, self.host)
        use = Use(f"{lane}{name}", stream.name, stream.clock[stream.name] + 1)
        read = [self.memory_of(tensor) for tensor in reads]
        written = [self.memory_of(tensor) for tensor in writes]
        for memory in (*read, *written):
            if stream.name not in memory.touched_by:
                memory.touched_by.add(stream.name)
                self._check_reuse(use, memory, stream)
        for memory in read:
            self._check(use, "reads", memory, stream, [memory.writer])
        for memory in written:
            self._check(use, "writes", memory, stream, [memory.writer, *memory.readers.values()])
        stream.clock[stream.name] = use.number
        for memory in read:
            memory.readers[stream.name] = use
        for memory in written:
            memory.earlier_writer, memory.writer, memory.readers = memory.writer, use, {}
        for memory in (*read, *written):
            memory.uses[stream.name] = use

    def waiting_operation(
        self, name: str, reads: list[Tensor], writes: list[Tensor], signals: Tensor, behind: Tensor
    ) -> None:
        """Queue a kernel that waits until `signals` say that `behind` is written."""
        stream, counts = self.current(), self.memory_of(signals)
        of_signals = {signals.untyped_storage()._cdata, behind.untyped_storage()._cdata}

        def others(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in of_signals]

        self.operation(name, others(reads), others(writes), stream)
        begun = Use(name, stream.name, stream.clock[stream.name])
        setter, before = counts.writer, counts.earlier_writer
        self._check(begun, "looks at the signals", counts, stream, [before])  # else it sees what they said then
        if setter is not None:
            self.signalled.append(stream.clock.get(setter.stream, 0) < setter.number)
            merge(stream.clock, {setter.stream: setter.number})
        self.operation(f"{name}, past the signals", [behind, signals], [signals], stream)

    def _check(
        self, use: Use, verb: str, memory: _Memory, stream: FakeCudaStream, others: Iterable[Use | None]
    ) -> None:
        self.races += [
            f"{use} {verb} {memory.name}, which nothing orders after {other}"
            for other in others
            if other is not None and stream.clock.get(other.stream, 0) < other.number
        ]

    def _check_reuse(self, use: Use, memory: _Memory, stream: FakeCudaStream) -> None:
        self.lifetimes += [
            f"{use} touches {memory.name}, whose memory {earlier} may still use: freed too early"
            for earlier in memory.before.values()
            if stream.clock.get(earlier.stream, 0) < earlier.number
        ]

    def host_reads(self, tensor: Tensor, name: str) -> None:
        """The host looks at a tensor's values: in its own memory it must have waited for whoever wrote them.

        On the device it would wait for the current stream. That is noted, but orders nothing here: a choreography
        that needs it would break with kernels that do without.
        """
        memory, stream = self.memory_of(tensor), self.current()
        if memory.on_host:
            writer = memory.writer
            if writer is not None and self.host.get(writer.stream, 0) < writer.number:
                self.races.append(f"the host reads {memory.name} ({name}), but has not waited for {writer}")
            return
        self.operation(name, [tensor], [], stream)
        if dbo_enabled():
            self.syncs.append(f"{name} in {_where()}")

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory_of(self, tensor: Tensor, made_by: str | None = None) -> _Memory:
        """What is known about a tensor's storage; `made_by` if it has just been allocated on the current stream."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._made += 1
            stream = self.current().name
            before = dict(self._freed.get(stream, {})) if made_by is not None else {}
            name = f"{made_by or 'given'} #{self._made} {list(tensor.shape)}"
            self._memory[key] = _Memory(name, stream, before)
            weakref.finalize(storage, self._free, key).atexit = False
        return self._memory[key]

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key)
        freed = self._freed.setdefault(memory.stream, {})
        for stream, use in memory.uses.items():
            known = freed.get(stream)
            if use.number > self.host.get(stream, 0) and (known is None or known.number < use.number):
                freed[stream] = use

    def host_like(self, tensor: Tensor) -> Tensor:
        """In place of `ubatch.ranks.host_copy.host_like`: memory of the host, which has no stream."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        memory = self.memory_of(copy)
        memory.on_host, memory.before = True, {}
        return copy

    # -- in force -------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check what the calling thread does in the `with` block."""
        with HostReads(self), Operations(self):
            yield

    @contextmanager
    def installed(self) -> Iterator[FakeCuda]:
        """Make it the device of every lane pool made in the `with` block, and of collectives; watch this thread."""
        run_lane, vote = Job._run_in_context, CommGroup.vote

        def watched_lane(job: Any) -> None:
            with self.watching():
                run_lane(job)

        def far(*args: Any) -> Way:
            way = way_of(*args)  # NCCL has no other way for small messages
            return Way.ONE if way is Way.NEAR else way

        def unwatched_vote(group: CommGroup, offer: Any) -> Any:
            with _disable_current_modes():  # on the CPU, by its own group
                return vote(group, offer)

        with ExitStack() as stack:
            for target, name, replacement in (
                (workers, "make_streams", lambda device: self),
                (Job, "_run_in_context", watched_lane),
                (eligibility, "why_not_in_lanes", lambda: None),  # its own modes are in every lane
                (wrapped, "why_not_in_lanes", lambda: None),
                (CommGroup, "vote", unwatched_vote),
                (Connection, "is_stream_ordered", lambda connection, device: True),
                (collectives, "dist", FakeCollectives(self)),
                (ways, "dist", FakeCollectives(self)),
                (collectives, "way_of", far),
                (ways, "all_gather_single", FakeCollectives(self).all_gather_single),
                (host_copy, "host_like", self.host_like),
                (collectives, "host_like", self.host_like),
            ):
                stack.enter_context(mock.patch.object(target, name, replacement))
            interpreter = sys.modules.get("triton.runtime.interpreter")
            if interpreter is not None:
                grid: Any = interpreter.GridExecutor  # type: ignore[attr-defined]
                stack.enter_context(mock.patch.object(grid, "__call__", watched_kernels(self, grid.__call__)))
            stack.enter_context(self.watching())
            yield self

    def check(self, what: str = "") -> None:
        """Fail if anything was wrong."""
        wrong = [*self.races, *self.lifetimes]
        assert not wrong, "\n".join([f"{what}: {len(wrong)} errors", *wrong[:20]])


def _covers(clock: Clock, other: Clock) -> bool:
    return all(clock.get(stream, 0) >= number for stream, number in other.items())


def _where() -> str:
    """The file of this repository that is at work."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and not path.is_relative_to(TESTS) and ".venv" not in path.parts:
            return str(path.relative_to(ROOT))
        frame = frame.f_back
    return "the caller"
