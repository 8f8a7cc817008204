"""Sums and conversions in C: torch's numbers, to the last bit, and torch's operators where C does not run."""

import pytest
import torch
from c_kernels import needs_c

from ubatch.kernels import Recording, add, add_bias, to_float

pytestmark = needs_c


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 15, 64, 300])
@torch.inference_mode()
def test_they_are_torchs_to_the_bit_and_can_be_recorded(dtype: torch.dtype, size: int) -> None:
    wide = torch.randn(3, 100, 2 * size).to(dtype)
    x, y, bias = wide[0, :, :size], wide[1, :, size:], wide[2, 0, :size]
    sums = torch.randn(100, 2 * size)[:, :size]
    expected = x + y, (sums + bias).to(dtype), x.to(torch.float32)
    with Recording() as recording:
        found = add(x, y), add_bias(sums, bias), to_float(x)
    assert recording.refused is None
    assert len(recording.calls) == (2 if dtype is torch.float32 else 3)
    for own, wanted in zip(found, expected, strict=True):
        assert own.dtype is wanted.dtype
        assert torch.equal(own, wanted)


def test_torch_computes_what_the_kernels_do_not_take() -> None:
    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    add(x, y).sum().backward()
    assert x.grad is not None
    assert torch.equal(add(y, y[0]), y + y[0])
    assert torch.equal(add(y.double(), y.double()), 2 * y.double())
    assert torch.equal(to_float(y.half()), y.half().float())
    bias = torch.randn(6).double()
    assert torch.equal(add_bias(y.double(), bias), y.double() + bias)
