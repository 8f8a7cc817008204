"""Every stream back end keeps what lanes rely on (`stream_checks`); a device that is missing has an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_streams import FakeEvent, FakeStreams
from stream_checks import CHECKS, DEVICES, Device, cuda_over_fakes

from ubatch.errors import ConfigError
from ubatch.streams.streams import CudaStreams, NullStreams, make_streams, mark_now


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.gpu] * (each == "cuda")) for each in DEVICES])
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_back_end(check: Callable[[Device], None], name: str) -> None:
    with DEVICES[name]() as device:
        check(device)


# --------------------------------------------------------------------------------------- broken ones are noticed


class OneForAll(FakeStreams):
    """All threads share a current stream."""

    def current(self) -> Any:
        return vars(self).get("shared", self.compute)

    def set_current(self, stream: Any) -> None:
        self.shared = stream


class Deaf(FakeStreams):
    """The current stream cannot be changed."""

    def set_current(self, stream: Any) -> None:
        pass


class Few(NullStreams):
    def sm_count(self) -> int:
        return 1


class WithEvents(FakeStreams):
    kind: type[FakeEvent] = FakeEvent

    def new_event(self) -> FakeEvent:
        return self.kind(self)


class Hasty(WithEvents):
    class kind(FakeEvent):  # noqa: N801 - an attribute
        def query(self) -> bool:
            return True


class Never(WithEvents):
    class kind(FakeEvent):  # noqa: N801
        def query(self) -> bool:
            return bool(self._marked) and super().query()


class NoEdge(WithEvents):
    class kind(FakeEvent):  # noqa: N801
        def wait(self, stream: Any) -> None:
            pass


BROKEN = [
    (OneForAll, "the_current_stream_is_the_threads_own"),
    (OneForAll, "lanes_run_on_the_callers_stream"),
    (Deaf, "the_current_stream_is_the_threads_own"),
    (Deaf, "lanes_run_on_the_callers_stream"),
    (Few, "every_thread_can_be_warmed_up"),
    (Hasty, "an_event_tells_when_its_work_is_done"),
    (Never, "an_event_that_marks_nothing_is_over"),
    (NoEdge, "a_stream_waits_for_an_event"),
]


@pytest.mark.parametrize(("kind", "check"), BROKEN, ids=lambda each: getattr(each, "__name__", each))
def test_a_broken_back_end_is_noticed(kind: type[Any], check: str) -> None:
    streams = kind()
    with pytest.raises(AssertionError):
        CHECKS[check](Device(streams, lambda: streams.work("work") if isinstance(streams, FakeStreams) else None))


# ---------------------------------------------------------------------------------------- which devices there are


def test_cuda_devices_are_told_apart_and_an_index_that_is_not_there_is_refused() -> None:
    with cuda_over_fakes() as device:
        assert isinstance(device.streams, CudaStreams)
        assert device.streams.device == torch.device("cuda:1"), "the current one"
        assert CudaStreams(torch.device("cuda:0")).device == torch.device("cuda:0")
        device.work()
        assert not mark_now(torch.device("cuda")).query()
        with pytest.raises(ConfigError, match="device cuda:2 asked for, but this torch sees 2 CUDA devices"):
            make_streams(torch.device("cuda:2"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the refusal where there is no CUDA device; here is one")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match="device cuda:1 asked for, but this torch sees no CUDA device"):
        make_streams(torch.device("cuda:1"))


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"device meta is not supported\. Use 'cpu' or 'cuda'"):
        make_streams(torch.device("meta"))
