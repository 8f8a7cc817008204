"""What every `StreamBackend` promises, and devices to check it on: a CPU, CUDA's over fakes, the fakes, a GPU."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import FakeCuda
from fake_streams import FakeStreams
from lanes import CPU, lane_pool, run

from ubatch.dbo import dbo_current_ubatch_id, dbo_switch_to_comm, dbo_yield
from ubatch.streams.streams import NullStreams, StreamBackend, make_streams

LONG = 200_000_000
"""Cycles that keep a stream busy for a tenth of a second or so."""


@dataclass
class Device:
    """A back end, and what the checks need beside it.

    Attributes:
        work: queues something that takes a while on the current stream.
        sms: streaming multiprocessors of the device.
    """

    streams: StreamBackend
    work: Callable[[], object] = lambda: None
    sms: int = 0

    @property
    def asynchronous(self) -> bool:
        """Whether queued work may be done later."""
        return not isinstance(self.streams, NullStreams)


@contextmanager
def _on_cpu() -> Iterator[Device]:
    yield Device(make_streams(CPU))


@contextmanager
def cuda_over_fakes() -> Iterator[Device]:
    """The real `CudaStreams` over a `torch.cuda` that has two devices of fake streams."""
    fake = FakeStreams()
    instead = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "set_device": lambda device: fake.warm_up(),
        "current_stream": lambda device: fake.current(),
        "set_stream": fake.set_current,
        "Stream": lambda device: fake.new_stream(),
        "Event": fake.new_event,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
    }
    with mock.patch.multiple(torch.cuda, **instead):
        yield Device(make_streams(torch.device("cuda")), lambda: fake.work("work"), 132)


@contextmanager
def _fakes() -> Iterator[Device]:
    fake = FakeStreams()
    yield Device(fake, lambda: fake.work("work"))


@contextmanager
def _checked_fakes() -> Iterator[Device]:
    cuda, x = FakeCuda(sms=99), torch.ones(2)
    yield Device(cuda, lambda: cuda.operation("work", [x], [], cuda.current()), 99)


@contextmanager
def _on_gpu() -> Iterator[Device]:
    device = torch.device("cuda")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    yield Device(make_streams(device), lambda: torch.cuda._sleep(LONG), sms)
    torch.cuda.synchronize()


DEVICES = {
    "cpu": _on_cpu,
    "cuda over fakes": cuda_over_fakes,
    "fake streams": _fakes,
    "fake cuda": _checked_fakes,
    "cuda": _on_gpu,
}


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What it returns in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(20)
    return found[0]


@contextmanager
def on(streams: StreamBackend, stream: Any) -> Iterator[None]:
    """Make it the current stream in the `with` block."""
    before = streams.current()
    streams.set_current(stream)
    try:
        yield
    finally:
        streams.set_current(before)


def the_current_stream_is_the_threads_own(device: Device) -> None:
    streams = device.streams
    before, other = streams.current(), streams.new_stream()
    with on(streams, other):
        assert streams.current() == other
        assert in_a_thread(streams.current) == before
    assert streams.current() == before
    assert (before != other) == device.asynchronous


def an_event_that_marks_nothing_is_over(device: Device) -> None:
    device.work()
    event = device.streams.new_event()
    assert event.query()
    event.wait(device.streams.current())
    event.synchronize()


def an_event_tells_when_its_work_is_done(device: Device) -> None:
    event, stream = device.streams.new_event(), device.streams.current()
    for _ in range(2):  # it can be recorded again
        device.work()
        event.record(stream)
        assert event.query() is not device.asynchronous
        event.synchronize()
        assert event.query()


def a_stream_waits_for_an_event(device: Device) -> None:
    """And so for all before it, but not for what is recorded by the same event later."""
    streams = device.streams
    here, other = streams.current(), streams.new_stream()
    marked, behind, later = (streams.new_event() for _ in range(3))
    with on(streams, other):
        device.work()
    marked.record(other)
    marked.wait(here)
    behind.record(here)
    assert behind.query() is not device.asynchronous
    with on(streams, other):
        device.work()
    later.record(other)
    behind.synchronize()
    assert marked.query()
    assert later.query() is not device.asynchronous


def every_thread_can_be_warmed_up(device: Device) -> None:
    streams = device.streams
    assert in_a_thread(lambda: (streams.warm_up(), streams.current())[1]) == streams.current()
    assert streams.sm_count() == device.sms


def lanes_run_on_the_callers_stream(device: Device) -> None:
    """Whatever they switch to, and if one fails; the caller is where it was. Their threads were warmed up before."""
    streams, warm_up = device.streams, device.streams.warm_up
    seen: list[Any] = []
    warm: list[int] = []

    def body() -> None:
        assert threading.get_ident() in warm
        seen.append(streams.current())
        dbo_switch_to_comm()
        dbo_yield()
        if len(seen) == 4 and dbo_current_ubatch_id() == 1:
            raise ZeroDivisionError

    streams.warm_up = lambda: (warm.append(threading.get_ident()), warm_up())[1]  # type: ignore[method-assign]
    with lane_pool(2, streams=streams) as pool:
        for stream in (streams.current(), streams.new_stream(), streams.new_stream()):
            with on(streams, stream):
                with nullcontext() if len(seen) != 2 else pytest.raises(ZeroDivisionError):
                    run(pool, body, body)
                assert streams.current() == stream
            assert seen[-2:] == [stream] * 2


CHECKS: dict[str, Callable[[Device], None]] = {
    check.__name__: check
    for check in (
        the_current_stream_is_the_threads_own,
        an_event_that_marks_nothing_is_over,
        an_event_tells_when_its_work_is_done,
        a_stream_waits_for_an_event,
        every_thread_can_be_warmed_up,
        lanes_run_on_the_callers_stream,
    )
}
