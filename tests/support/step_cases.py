"""A runner on fake streams: every torch operation of its steps becomes work on the stream that is current, with what it
reads and writes by storage.

Here device and host share one memory, so what is whose is worked out from where it came from:

    device    what was there before the recording (weights, KV cache), what arrived by an upload, what came of those
    host      what was made from Python numbers, the runner's tables, what came of those; not looked at further
    pinned    the step's staging buffers: the host reads and writes them at once, copies when their stream gets there

An operation that mixes device and host, or makes the host wait for the device, would fail or stall on a GPU. So would
what `step_host` sees: copies past pinned memory, and the host's looks at what the device computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_graphs import HOST_READS, has_data_dependent_shape
from fake_streams import FakeStream, FakeStreams, Operation
from step_host import HostSide, Place, watched_launches
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model_runner import ModelRunner
from model_runner.step.streams import PinnedBuffers
from ubatch.lanes.crew import Job


@dataclass(eq=False)
class Memory:
    """One storage.

    Attributes:
        name: unique.
        place: whose it is.
        home: the stream that was current when it was made; the allocator gives it out again in the order of that one.
        uses: all operations on it.
    """

    name: str
    place: Place
    home: FakeStream
    uses: list[Operation] = field(default_factory=list)


class StepStreamsFake(FakeStreams):
    """Fake streams with a new one for everybody who asks; the caller's own is called so.

    Attributes:
        faults: besides races: what would stall the host or fail on a GPU, and memory that is freed while in use.
        tag: what operations are named after, such as the step.
        memories: storages seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compute.name = "caller"
        self.streams: dict[str, FakeStream] = {}
        self.faults: list[str] = []
        self.tag = ""
        self.memories = 0

    def new_stream(self) -> FakeStream:
        name = ("forward", "upload", "download", *(f"stream {n}" for n in range(9)))[len(self.streams)]
        return self.streams.setdefault(name, FakeStream(name))

    def host_access(self, memory: Memory, *, writes: bool) -> None:
        """The host reads or writes pinned memory now."""
        buffer = self._buffer(memory.name)
        others = [*([] if buffer.writer is None else [buffer.writer]), *(buffer.readers if writes else [])]
        for each in others:
            if each not in self.host:
                what = "writes" if writes else "reads"
                self.races.append(f"{self.tag}the host {what} {memory.name}, and has not waited for {each}")

    def free(self, memory: Memory) -> None:
        """A storage is gone: its home stream may give it out again at once."""
        for each in memory.uses:
            if each.stream is not memory.home and each not in memory.home.done | self.host:
                self.faults.append(f"{memory.name} of {memory.home} is freed while {each} on {each.stream} may use it")

    def tagged(self, prefix: str, stream: str | None = None) -> list[Operation]:
        """Operations by the start of their name, of all streams or one."""
        return [
            each
            for each in self.operations
            if each.name.startswith(prefix) and (stream is None or each.stream.name == stream)
        ]


class Recorder(TorchDispatchMode):
    """Puts every operation on the fake streams."""

    def __init__(self, fake: StepStreamsFake, device: Iterable[Tensor], host: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.fake = fake
        self._memory: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()
        for place, tensors in ((Place.DEVICE, device), (Place.HOST, host)):
            for tensor in tensors:
                self.memory(tensor).place = place

    def for_another_thread(self) -> Recorder:
        """The same, to be entered in a lane's thread."""
        other = Recorder(self.fake, ())
        other._memory = self._memory
        return other

    def memory(self, tensor: Tensor) -> Memory:
        """What is known of a tensor's storage."""
        storage = tensor.untyped_storage()
        known = self._memory.get(storage)
        if known is None:
            known = Memory(f"memory {self.fake.memories}", Place.OPEN, self.fake.current())
            self._memory[storage] = known
            self.fake.memories += 1
            weakref.finalize(storage, self.fake.free, known).atexit = False
        return known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inputs = [self.memory(tensor) for tensor in given]
        self._check_host_waits(func, inputs, args, kwargs)
        result = func(*args, **kwargs)
        outputs = [self.memory(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        changed = self._changed(func, args, kwargs)
        fresh = [memory for memory in outputs if memory not in inputs]
        if str(func).startswith("aten.lift_fresh"):
            for memory in outputs:
                memory.place = Place.HOST
        elif (changed or fresh) and not str(func).startswith("aten.empty"):
            self._record(func, inputs, changed, fresh, given)
        return result

    def _changed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Memory]:
        values = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)
        written = (
            values.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write
        )
        return [self.memory(leaf) for leaf in tree_leaves(list(written)) if isinstance(leaf, Tensor)]

    def _check_host_waits(self, func: Any, inputs: list[Memory], args: Any, kwargs: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        waits = name in HOST_READS or has_data_dependent_shape(name, args, kwargs)
        if waits and any(memory.place is Place.DEVICE for memory in inputs):
            self.fault(f"{name} makes the host wait for the device")

    # -- what `step_host` sees ------------------------------------------------------------------------------------

    def place_of(self, tensor: Tensor) -> Place:
        return self.memory(tensor).place

    def put(self, tensor: Tensor, place: Place) -> None:
        memory = self.memory(tensor)
        if memory.place is Place.OPEN:
            memory.place = place

    def fault(self, what: str) -> None:
        self.fake.faults.append(f"{self.fake.tag}{what}")

    def launched(self, name: str, tensors: list[Tensor], changed: list[Tensor]) -> None:
        memories = [self.memory(tensor) for tensor in tensors]
        if any(memory.place in (Place.HOST, Place.PINNED) for memory in memories):
            self.fault(f"{name} is launched with a tensor of the host")
        self._settle(memories, Place.DEVICE)
        self._work(f"{self.fake.tag}{name}", memories, [self.memory(tensor) for tensor in changed])

    # -- operations -----------------------------------------------------------------------------------------------

    def _record(
        self, func: Any, inputs: list[Memory], changed: list[Memory], fresh: list[Memory], given: list[Tensor]
    ) -> None:
        name = f"{self.fake.tag}{func._schema.name.removeprefix('aten::')}"
        places = {memory.place for memory in inputs}
        if func._schema.name == "aten::copy_" and self._crosses(changed[0], self.memory(given[1])):
            self._settle(changed, Place.DEVICE)
            self._work(name, [self.memory(given[1])], changed)
        elif Place.DEVICE in places:
            on_host = [memory for memory in inputs if memory.place in (Place.HOST, Place.PINNED)]
            scalars = all(tensor.dim() == 0 for tensor in given if self.memory(tensor) in on_host)
            if on_host and not scalars:
                sizes = [(self.memory(tensor).place.value, tuple(tensor.shape)) for tensor in given]
                self.fake.faults.append(f"{name} takes tensors of the host and of the device: {sizes}")
            self._settle((*inputs, *fresh), Place.DEVICE)
            self._work(name, [each for each in inputs if each not in on_host], [*changed, *fresh])
        elif places & {Place.HOST, Place.PINNED}:
            for memory in {id(each): each for each in inputs if each.place is Place.PINNED}.values():
                self.fake.host_access(memory, writes=memory in changed)
            self._settle((*inputs, *fresh), Place.HOST)
        else:  # it may be either's: as it belongs to the stream's order, it does no harm to put it there
            self._work(name, inputs, [*changed, *fresh])

    @staticmethod
    def _crosses(target: Memory, source: Memory) -> bool:
        """Whether a copy goes from pinned memory to the device or back."""
        if source.place is Place.PINNED:
            return target.place in (Place.DEVICE, Place.OPEN)
        return source.place is Place.DEVICE and target.place is Place.PINNED

    @staticmethod
    def _settle(memories: Iterable[Memory], place: Place) -> None:
        for memory in memories:
            if memory.place is Place.OPEN:
                memory.place = place

    def _work(self, name: str, reads: Iterable[Memory], writes: Iterable[Memory]) -> None:
        reads, writes = list(dict.fromkeys(reads)), list(dict.fromkeys(writes))
        operation = self.fake.work(name, reads=[each.name for each in reads], writes=[each.name for each in writes])
        for memory in (*reads, *writes):
            memory.uses.append(operation)


@contextmanager
def recording(runner: ModelRunner, fake: StepStreamsFake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """All of the runner's steps in the `with` block go to the fake streams."""
    device = [*runner.model.parameters(), *runner.model.buffers(), *tensors_of(runner.kv_cache)]
    device += tensors_of(runner.future_map)
    recorder = Recorder(fake, device, tensors_of(runner.request_table))
    with recorded(recorder, monkeypatch):
        yield recorder


@contextmanager
def recorded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All that is done in the `with` block, and by lanes, goes to the recorder's fake streams."""
    monkeypatch.setattr(
        "ubatch.wrapping.eligibility.why_not_in_lanes", lambda: None
    )  # the recorder is in every lane, too
    take = PinnedBuffers.take

    def pinned(self: PinnedBuffers, nbytes: int) -> Tensor:
        buffer = take(self, nbytes)
        recorder.memory(buffer).place = Place.PINNED
        return buffer

    run = Job._run_in_context

    def run_in_lane(job: Job) -> None:
        with recorder.for_another_thread() as other, HostSide(other):
            run(job)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "_run_in_context", run_in_lane)
        patch.setattr(PinnedBuffers, "take", pinned)
        with recorder, HostSide(recorder), watched_launches(Recorder):
            yield


def tensors_of(thing: object) -> list[Tensor]:
    """The tensors among an object's attributes."""
    return [leaf for leaf in tree_leaves(list(vars(thing).values())) if isinstance(leaf, Tensor)]
