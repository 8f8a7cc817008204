"""How the GPU benchmarks time, on a device that is not there: its clock is turned by what is put on its streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serving.workbench.gpu import prefill
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.decode import count_launches
from serving.workbench.gpu.experts import _kernel_or_eager
from serving.workbench.gpu.report import Section


@dataclass
class Device:
    """Streams with clocks in milliseconds, and what is being captured."""

    ends: dict[str, float] = field(default_factory=lambda: {"main": 0.0})
    stream: str = "main"
    capturing: list[float] | None = None
    host_s: float = 0.0

    def work(self, ms: float) -> Callable[[], None]:
        """Something that launches work of so many milliseconds."""

        def run() -> None:
            if self.capturing is not None:
                self.capturing.append(ms)
            else:
                self.ends[self.stream] += ms

        return run

    def synchronize(self, device: object = None) -> None:
        latest = max(self.ends.values())
        self.ends = dict.fromkeys(self.ends, latest)
        self.host_s = latest / 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """In the place of `torch.cuda`."""
    found = Device()

    class Graph:
        def __init__(self) -> None:
            self.ms: list[float] = []

        def replay(self) -> None:
            found.ends[found.stream] += sum(self.ms)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = found.ends[found.stream]

        def synchronize(self) -> None:
            found.synchronize()

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    @contextmanager
    def graph(into: Graph) -> Iterator[None]:
        found.capturing = into.ms
        yield
        found.capturing = None

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        found.stream = name
        yield
        found.stream = "main"

    def new_stream() -> str:
        found.ends["side"] = max(found.ends.values())
        return "side"

    for name, value in (
        ("CUDAGraph", Graph),
        ("Event", Event),
        ("graph", graph),
        ("stream", stream),
        ("Stream", new_stream),
        ("synchronize", found.synchronize),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("serving.workbench.gpu.bench.time.perf_counter", lambda: found.host_s)
    return found


def bench() -> Bench:
    return Bench(torch.device("cuda"))


def test_short_kernels_are_timed_many_in_a_graph(device: Device) -> None:
    arm = bench().kernel(device.work(0.1))
    before = device.ends["main"]
    assert arm() == pytest.approx(0.1)
    assert device.ends["main"] - before == pytest.approx(21 * 0.1), "2 ms at least"
    assert bench().kernel(device.work(30.0))() == pytest.approx(30.0)
    assert bench().kernel(device.work(0.1), capture=False)() == pytest.approx(0.1)


def test_a_peer_that_cannot_be_captured_is_timed_with_its_launches(device: Device) -> None:
    work = device.work(0.5)

    def reads_on_the_host() -> None:
        if device.capturing is not None:
            device.capturing = None
            raise RuntimeError("operation not permitted when stream is capturing")
        work()

    assert _kernel_or_eager(bench(), reads_on_the_host)() == pytest.approx(0.5)


def test_steps_are_replays_and_ceilings_the_median_of_some(device: Device) -> None:
    replay = bench().step(device.work(7.0))
    before = device.ends["main"]
    replay()
    assert device.ends["main"] - before == 7.0
    assert bench()._fastest_s(device.work(4.0)) == pytest.approx(4e-3)


def test_products_beside_copies_and_copies_that_end_too_early(device: Device) -> None:
    alone, beside = prefill._beside_copies(bench(), device.work(1.0), device.work(40.0))
    assert (alone(), beside()) == pytest.approx((1.0, 1.0))

    _, beside = prefill._beside_copies(bench(), device.work(10.0), device.work(4.0))
    with pytest.raises(prefill._EndedEarly, match="the copies ended before the products"):
        beside()


def test_a_slow_down_that_cannot_be_measured_is_missing_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_early(*_: object) -> Any:
        raise prefill._EndedEarly("the copies ended early")

    section, here, setting = Section("prefill", "Prefill"), Bench(torch.device("cpu"), tiny=True), SimpleNamespace()
    setting.model = setting.step = None
    for name in ("_experts_of_a_half", "_copies"):
        monkeypatch.setattr(prefill, name, lambda *_: list)
    monkeypatch.setattr(here, "interleave", ends_early)
    prefill._add_gemm_slowdown(here, section, setting)  # type: ignore[arg-type]
    (figure,) = section.figures
    assert (figure.value, figure.note) == (None, "the copies ended early")
    assert not section.complete


def test_launches_are_calls_of_the_runtime_and_the_driver() -> None:
    names = [
        "cudaGraphLaunch",
        "cudaLaunchKernel",
        "cuLaunchKernelEx",
        "cudaMemcpyAsync",
        "cudaStreamSynchronize",
        "cudaStreamIsCapturing",
        "cutlass_80_wmma_LaunchKernel_like",
        "Memcpy HtoD (Pinned -> Device)",
        "void at::native::elementwise_kernel<128, 4>",
    ]
    assert count_launches(names) == Counter({"LaunchKernel": 2, "GraphLaunch": 1, "Memcpy": 1})
