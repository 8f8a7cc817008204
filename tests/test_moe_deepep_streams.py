"""DeepEP's asynchronous mode, as if on a GPU: its own stream, its events, and memory that it marks for the allocator.

`fake_cuda` checks every operation of the real back ends, kernel and experts against every kernel of the stand-in. The
synchronous mode, which captures use, is checked with the other transports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

from deep_ep_standin_events import place
from deepep_cases import Stack, close, lanes_of, layer_of, rows_of, run_checks, transport
from fake_cuda import FakeCuda, FakeCudaStream
from torch import Tensor

from moe.all2all.deepep import DeepEPStreamed, Prepared, Queued
from ubatch import CommGroup, Recv, Schedule, get_schedule

NAMED = [get_schedule(name) for name in ("mlp_shared_overlap", "two_batch_decode")]
SCHEDULES = [
    *NAMED,
    replace(NAMED[0], name="received by the peer", recv=Recv.PEER),
    replace(NAMED[0], name="every point", points_off=frozenset()),
]


class FakeCudaWithDeepEP(FakeCuda):
    """A device with DeepEP's stream on it.

    A tensor that DeepEP has marked for a stream (`record_stream`) is not given out again before that stream is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.deep_ep = FakeCudaStream("deep_ep")
        self._marked: set[int] = set()

    def deep_ep_kernel(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        for tensor in writes:
            self.memory_of(tensor, made_by=f"deep_ep.{name}")
        self.operation(f"deep_ep.{name}", reads, writes, self.deep_ep)
        self._marked |= {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}

    def _free(self, key: int) -> None:
        if key in self._marked:
            self._marked.remove(key)
            self._memory[key].uses = {
                stream: use for stream, use in self._memory[key].uses.items() if stream == self._memory[key].stream
            }
        super()._free(key)


def test_order_and_memory() -> None:
    run_checks(_in_order)


def test_what_is_left_out_is_found() -> None:
    run_checks(_planted)


def _run(
    name: str, group: CommGroup, schedule: Schedule, rank: int, lanes: int = 2, patch: Any = None, **options: Any
) -> FakeCuda:
    """Two steps in lanes, checked; their result must be that of the plain call."""
    model = Stack([layer_of(seed) for seed in (0, 1)], transport(name, group, **options))
    x = rows_of(7 + 2 * rank, rank)
    expected = model(x)
    with patch or nullcontext(), _device() as cuda:
        wrapper = lanes_of(model, group, schedule, lanes)
        for _ in range(2):
            result = wrapper(x) * 1
        assert wrapper.statistics().engaged == 2, wrapper.statistics()
        wrapper.close()
    close(result, expected, f"{name}, {schedule.name}")
    assert cuda.deep_ep.clock["deep_ep"] > 0
    return cuda


@contextmanager
def _device() -> Iterator[FakeCudaWithDeepEP]:
    place.device = FakeCudaWithDeepEP()
    try:
        with place.device.installed():
            yield place.device
    finally:
        place.device = None


def _in_order(rank: int, group: CommGroup) -> None:
    for schedule in SCHEDULES:
        _run("deepep_high_throughput", group, schedule, rank).check(schedule.name)
    for name in ("deepep_high_throughput", "deepep_v2"):
        _run(name, group, SCHEDULES[-1], rank, 3, use_fp8=True).check(f"{name}, three lanes in fp8")
        _run(name, group, SCHEDULES[0], rank, worst_case=True).check(f"{name}, without counts")


def _planted(rank: int, group: CommGroup) -> None:
    """Each left out in turn, in the real code; and what DeepEP's own marks are for."""

    def planted(target: Any, what: str, instead: Callable[..., Any], schedule: Schedule = SCHEDULES[0]) -> FakeCuda:
        patch = mock.patch.object(target, what, instead)
        return _run("deepep_high_throughput", group, schedule, rank, patch=patch, use_fp8=True)

    never_waits = planted(DeepEPStreamed, "after", lambda self, event, order: Queued()).races
    for kernel in ("dispatch", "combine"):
        assert any("on compute reads" in race and f"deep_ep.{kernel}" in race for race in never_waits), never_waits[:3]

    prepare = DeepEPStreamed.prepare

    def marks_too_early(self: DeepEPStreamed, x: Tensor, *, quantized: bool) -> Prepared:
        mark = self.capture()
        return replace(prepare(self, x, quantized=quantized), computed=mark)

    too_early = planted(DeepEPStreamed, "prepare", marks_too_early).races
    assert any("deep_ep.dispatch on deep_ep reads" in race for race in too_early), too_early[:3]

    unmarked = planted(FakeCudaWithDeepEP, "_free", FakeCuda._free, SCHEDULES[-1])
    assert not unmarked.races
    assert any("freed too early" in each for each in unmarked.lifetimes), unmarked.lifetimes[:3]
