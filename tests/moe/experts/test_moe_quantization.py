"""Activations in fp8, in blocks of 128."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe import dequantize_blocks, quantize_blocks
from moe.experts.quantization import FP8
from ubatch import ConfigError


@given(
    rows=st.integers(0, 3),
    blocks=st.integers(1, 3),
    scale=st.floats(-6, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_quantization_loses_little(rows: int, blocks: int, scale: float, dtype: torch.dtype, seed: int) -> None:
    """Half a step of 3 bits of mantissa for what is large in its block, a fixed small error for the rest."""
    x = (torch.randn(rows, blocks * 128, generator=torch.Generator().manual_seed(seed)) * 10**scale).to(dtype)
    quantized, scales = quantize_blocks(x)
    assert quantized.dtype is FP8
    assert scales.shape == (rows, blocks)
    assert scales.is_contiguous()
    restored = dequantize_blocks(quantized, scales, torch.float32)
    assert restored.isfinite().all()
    step = scales.repeat_interleave(128, dim=1) * 2.0**-9  # of the smallest numbers
    assert ((restored - x.float()).abs() <= torch.maximum(x.float().abs() / 16, step) * 1.001).all()
    if rows:  # a row's bits do not depend on its batch
        alone, own_scales = quantize_blocks(x[-1:])
        assert torch.equal(alone.view(torch.uint8), quantized[-1:].view(torch.uint8))
        assert torch.equal(own_scales, scales[-1:])


def test_zeros_and_extremes_survive() -> None:
    x = torch.tensor([0.0, 448.0, -448.0, 3e38]).repeat_interleave(128).view(1, -1)
    restored = dequantize_blocks(*quantize_blocks(x), torch.float32)
    torch.testing.assert_close(restored, x)
    nothing = quantize_blocks(torch.zeros(2, 0))
    assert dequantize_blocks(*nothing, torch.bfloat16).shape == (2, 0)


def test_bad_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a multiple of 128, not torch\.float32 \[2, 100\]"):
        quantize_blocks(torch.zeros(2, 100))
    x, scales = quantize_blocks(torch.zeros(2, 256))
    for bad_x, bad_scales in ((x.float(), scales), (x, scales[:1]), (x, scales.double()), (x, torch.zeros(2, 3))):
        with pytest.raises(ConfigError, match="do not fit: fp8 is"):
            dequantize_blocks(bad_x, bad_scales, torch.float32)
