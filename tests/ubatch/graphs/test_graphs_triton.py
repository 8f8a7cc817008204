"""Triton kernels in a capture: recorded in the interpreter, replayed in one thread with everything around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_cases import WIDTH, graphed
from torch import Tensor, nn

from ubatch import CaptureFailed, capturing, dbo_yield

pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Doubling(nn.Module):
    """A layer, a kernel that adds the layer's result to a running sum and doubles it, another layer."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("sum", torch.zeros(1, WIDTH))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        from triton_cases import double_and_add

        y = self.first(x)
        dbo_yield()
        doubled = double_and_add(y, self.sum)
        dbo_yield()
        if self.reads and capturing():
            doubled.tolist()
        return self.second(doubled)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lanes", [1, 2])
def test_kernels_are_replayed_in_their_place(lanes: int, device: str) -> None:
    settings: dict[str, Any] = {"enable_dbo": False} if lanes == 1 else {"num_ubatches": lanes}
    with graphed(Doubling(), device=device, **settings) as case:
        total = case.wrapper.module.sum
        case.wrapper.capture(case.x(4))
        total.zero_()
        for _ in range(5):
            x = case.x(4)
            result = case.wrapper(x)
            added = total.clone()
            total.zero_()
            assert torch.equal(result, case.eager(x))
            torch.testing.assert_close(added, total)
            total.zero_()
        assert case.wrapper.statistics().graph_replays == 5


def test_what_a_kernel_writes_is_the_devices() -> None:
    with (
        graphed(Doubling(reads=True), num_ubatches=2) as case,
        pytest.raises(CaptureFailed, match=r"Tensor\.tolist reads what the device has not computed yet"),
    ):
        case.wrapper.capture(case.x(4))


def test_a_capture_launches_no_kernel() -> None:
    with graphed(Doubling(), enable_dbo=False) as case:
        case.wrapper.capture(case.x(4))
        after_warm_up = case.wrapper.module.sum.clone()
        case.wrapper.capture(x := case.x(4))
        twice = case.wrapper.module.sum - after_warm_up
        case.wrapper.module.sum.zero_()
        case.wrapper(x)
        torch.testing.assert_close(twice, 2 * case.wrapper.module.sum)
