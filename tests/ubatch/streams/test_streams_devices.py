"""The streams of a device: null streams on a CPU, a named error for a missing device."""

from __future__ import annotations

import pytest
import torch

from ubatch.errors import ConfigError
from ubatch.streams.streams import CudaStreams, NullStreams, make_streams

CPU = torch.device("cpu")


def test_a_cpu_has_null_streams() -> None:
    streams = make_streams(CPU)
    assert isinstance(streams, NullStreams)
    assert (streams.current(), streams.new_stream()) == (None, None)
    event = streams.new_event()
    event.record(streams.current())
    event.wait(streams.current())
    streams.set_current(streams.current())
    streams.warm_up()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the refusal where there is no CUDA device; here is one")
def test_cuda_is_refused_where_there_is_none() -> None:
    for make in (make_streams, CudaStreams):
        with pytest.raises(ConfigError, match="device cuda:1 asked for, but this torch sees no CUDA device"):
            make(torch.device("cuda:1"))


def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device cuda:2 asked for, but this torch sees 2 CUDA devices"):
        make_streams(torch.device("cuda:2"))


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"device meta is not supported\. Use 'cpu' or 'cuda'"):
        make_streams(torch.device("meta"))
