"""DeepEP's asynchronous mode, as if on a GPU: its own stream, its events, and memory that it marks for the allocator.

`fake_cuda` checks every operation of the real back ends, kernel and experts against every kernel of the stand-in. The
synchronous mode, and every schedule, is checked with the other transports (`test_moe_schedules_streams`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import deep_ep_standin
import pytest
import torch
from deepep_cases import TOP_K, Stack, close, lanes_of, layer_of, rows_of, run_checks, transport
from deepep_device import FakeCudaWithDeepEP, deepep_device
from fake_cuda import FakeCuda
from torch import Tensor, nn

from moe import SoftmaxTopKRouter
from moe.all2all.deepep.base import DeepEPStreamed, Prepared, Queued
from ubatch import CommGroup, Schedule, get_schedule

pytestmark = pytest.mark.ranks

OVERLAP = get_schedule("mlp_shared_overlap")
EVERY_POINT = replace(OVERLAP, name="every point", points_off=frozenset())


@pytest.mark.slow
def test_what_a_dispatch_would_convert_is_behind_its_mark() -> None:
    run_checks(_converted)


@pytest.mark.slow
def test_what_is_left_out_is_found() -> None:
    run_checks(_planted)


def _run(
    name: str,
    group: CommGroup,
    schedule: Schedule,
    rank: int,
    patch: Any = None,
    router: nn.Module | None = None,
    **options: Any,
) -> FakeCuda:
    """Two steps in lanes, checked; their result must be that of the plain call."""
    model = Stack([layer_of(seed) for seed in (0, 1)], transport(name, group, **options))
    if router is not None:
        model.router = router
    x = rows_of(7 + 2 * rank, rank)
    expected = model(x)
    with patch or nullcontext(), deepep_device() as cuda:
        wrapper = lanes_of(model, group, schedule)
        for _ in range(2):
            result = wrapper(x) * 1
        assert wrapper.statistics().engaged == 2, wrapper.statistics()
        wrapper.close()
    close(result, expected, f"{name}, {schedule.name}")
    assert cuda.deep_ep.clock["deep_ep"] > 0
    return cuda


class _Strided(nn.Module):
    """A router whose ids and weights are strided."""

    def __init__(self) -> None:
        super().__init__()
        self.router = SoftmaxTopKRouter(TOP_K)

    def forward(self, logits: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.t().contiguous().t() for each in self.router(logits))


def _converted(rank: int, group: CommGroup) -> None:
    """Ids where DeepEP was built for 32 bits, and ids and weights that are not contiguous."""
    for name in ("deepep_high_throughput", "deepep_v2"):
        for schedule in (EVERY_POINT, replace(EVERY_POINT, chunks=2)):
            with mock.patch.object(deep_ep_standin, "topk_idx_t", torch.int32):
                _run(name, group, schedule, rank).check(f"{name}, ids of 32 bits, {schedule.chunks} chunks")
            strided = _run(name, group, schedule, rank, router=_Strided())
            strided.check(f"{name}, strided, {schedule.chunks} chunks")


def _planted(rank: int, group: CommGroup) -> None:
    """Each left out in turn, in the real code; and what DeepEP's own marks are for."""

    def planted(target: Any, what: str, instead: Callable[..., Any], schedule: Schedule = OVERLAP) -> FakeCuda:
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

    unmarked = planted(FakeCudaWithDeepEP, "_free", FakeCuda._free, EVERY_POINT)
    assert not unmarked.races
    assert any("freed too early" in each for each in unmarked.lifetimes), unmarked.lifetimes[:3]
