"""The parts of `StepStreams` by themselves: blocks, plans, buffers, packing, and a CPU, which orders nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from step_cases import Memory, StepStreamsFake
from step_host import Place

from model_runner.step.streams import PinnedBuffers, StepStreams
from ubatch import PeerFailed
from ubatch.ranks.host_copy import CopiedWork
from ubatch.streams.small_copies import HostCopy, Packing, staged, to_device, to_host


def test_the_last_plan_is_copied_before_the_next_is_written() -> None:
    """As flashinfer does: it writes its plan to one pinned buffer, and queues a copy of it."""
    fake = StepStreamsFake()
    streams = StepStreams(torch.device("cpu"), fake)
    pinned = Memory("the plan", Place.PINNED, fake.compute)
    for step in range(3):
        with streams.forward():
            with streams.planning():
                fake.host_access(pinned, writes=True)
                fake.work(f"copy {step}", reads=["the plan"], writes=["the plan on the device"])
            fake.work(f"forward {step}", reads=["the plan on the device"], writes=["hidden"])
        assert not {each.name for each in fake.host} & {f"copy {step}", f"forward {step}"}
    assert fake.races == []
    with streams.forward():
        fake.host_access(pinned, writes=True)
    assert fake.races == ["the host writes the plan, and has not waited for copy 2"]


def test_blocks() -> None:
    fake = StepStreamsFake()
    streams = StepStreams(torch.device("cpu"), fake)
    fake.work("before", writes=["x"])
    with streams.forward():
        assert fake.current() is fake.streams["forward"]
        with streams.forward(join=True):  # part of the outer one
            fake.work("in", reads=["x"], writes=["y"])
        assert fake.current() is fake.streams["forward"]
    assert fake.current() is fake.compute
    assert fake.work("after", reads=["x"]).waits == {fake.operations[0]}
    with pytest.raises(RuntimeError, match="fails"), streams.forward(join=True):
        fail(fake)
    assert fake.current() is fake.compute
    fake.work("reads", reads=["z"])
    assert fake.races == []


def fail(fake: StepStreamsFake) -> None:
    fake.work("failing", writes=["z"])
    raise RuntimeError("it fails")


def held(buffers: PinnedBuffers) -> int:
    """Bytes that are free or lent."""
    return sum(each.nbytes for each in (*buffers._free, *(lent for _, lent, _ in buffers._lent)))


def test_buffers_and_events_are_used_again() -> None:
    fake = StepStreamsFake()
    made = []
    new_event = fake.new_event
    fake.new_event = lambda: made.append(new_event()) or made[-1]  # type: ignore[func-returns-value, method-assign]
    streams = StepStreams(torch.device("cpu"), fake)
    sizes, counts = [], []
    for step in range(30):
        with streams.forward():
            numbers = torch.arange(step % 7 + 1) + step
            copies = [to_host(each) for each in to_device([numbers, numbers.double()], torch.device("cpu"))]
        assert [copy.wait().tolist() for copy in copies] == [numbers.tolist(), numbers.tolist()]
        assert [copy.wait().tolist() for copy in copies] == [numbers.tolist(), numbers.tolist()]
        sizes.append(held(streams._pinned))
        counts.append(len(made))
    assert sizes[-1] == sizes[3]
    assert counts[-1] == counts[3]


def test_what_is_staged_stays_until_its_block_is_done() -> None:
    """A library copies from it whenever it likes in the block."""
    fake = StepStreamsFake()
    streams = StepStreams(torch.device("cpu"), fake)
    staging: list[torch.Tensor] = []
    for number in range(4):
        if number == 3:
            fake.host |= fake.streams["forward"].done
        with streams.forward():
            own = staged([torch.tensor([number]), torch.arange(3)], torch.device("cpu"))
            staging.append(own[0])
            fake.work(f"the library's copy {number}")
        assert own[1].tolist() == [0, 1, 2]
    assert [each.item() for each in staging[:3]] != [0, 1, 2], "the last one took the place of one whose block is done"
    assert len({each.data_ptr() for each in staging}) == 3
    assert staging[3].item() == 3


def test_pinned_buffers() -> None:
    buffers = PinnedBuffers(pin=False)
    assert buffers.take(0).nbytes == 4096
    with torch.inference_mode():
        small, large = buffers.take(4096), buffers.take(4097)
    assert (small.nbytes, large.nbytes, small.is_inference()) == (4096, 8192, False)
    buffers.give(large)
    buffers.give(small)
    assert held(buffers) == 12288
    assert buffers.take(10) is small
    fake = StepStreamsFake()
    event, over = fake.new_event(), []
    fake.work("copy")
    event.record(fake.compute)
    buffers.lend(small, event, over.append)
    assert buffers.take(10) is large
    assert over == []
    event.synchronize()
    assert buffers.take(10) is small
    assert over == [event]


def test_packing() -> None:
    tensors = [
        torch.arange(5),
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.empty(0, dtype=torch.int64),
        torch.tensor(7),
        torch.rand(2, 3, 4, dtype=torch.float64).transpose(0, 2),
        torch.empty(0, 4),
        torch.tensor([True, False]),
    ]
    packing = Packing.of(tensors)
    buffer = torch.zeros(packing.nbytes + 8, dtype=torch.uint8)
    packing.write(buffer, tensors)
    for view, tensor in zip(packing.read(buffer), tensors, strict=True):
        assert torch.equal(view, tensor)
        assert view.is_contiguous()
        assert view.untyped_storage().data_ptr() == buffer.data_ptr()
        assert (view.storage_offset() * view.itemsize) % 128 == 0


class PeersGone:
    """A group of two of which one is dead, so that what the device waits for never comes."""

    size = 2

    def usable_connection(self) -> PeersGone:
        return self

    def wait_for_works(self, works: Sequence[CopiedWork], name: str) -> None:
        assert name == "the device's part of a step"
        if not all(work.is_completed() for work in works):
            raise PeerFailed(1, "rank 1 is dead.")


def test_a_peer_that_is_gone_ends_every_wait() -> None:
    fake = StepStreamsFake()
    streams = StepStreams(torch.device("cpu"), fake, PeersGone())  # type: ignore[arg-type]
    with streams.forward(), streams.planning():  # nothing was planned before
        fake.work("collective")
        copy = to_host(torch.arange(3))
    for _ in range(2):
        with pytest.raises(PeerFailed):
            copy.wait()
    with streams.forward(), pytest.raises(PeerFailed), streams.planning():
        pytest.fail("the buffers of the last plan may be in use")
    streams.close()
    fake.host |= fake.streams["download"].done
    assert copy.wait().tolist() == [0, 1, 2]


def test_a_cpu_orders_nothing() -> None:
    streams = StepStreams(torch.device("cpu"))
    assert not streams.asynchronous
    numbers = torch.arange(3)
    with streams.forward(), streams.planning():
        assert to_device([numbers], torch.device("cpu"))[0] is numbers
        assert to_host(numbers).wait() is numbers
        streams.keep(numbers)
    streams.close()
    assert streams._block == []
    assert HostCopy(numbers).done()
