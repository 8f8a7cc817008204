"""Rows sorted by expert, and activations in fp8: the low-latency layout, without a transport."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_layers import make_layer, make_tokens
from torch import Tensor

from moe import BatchedExperts, FusedExperts, dequantize_blocks, make_experts, quantize_blocks
from moe.experts.quantization import FP8
from ubatch import ConfigError

BATCHED = ["grouped", "native", "packed", "reference"]


@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    room=st.integers(5, 7),
    seed=st.integers(0, 99),
    name=st.sampled_from(BATCHED),
)
def test_batches_equal_rows(rows: list[int], room: int, seed: int, name: str) -> None:
    """Every row is what its expert makes of it alone; rows behind the counts are NaN, and nobody sees it."""
    held = len(rows)
    layer = make_layer(held, seed=seed)
    experts = make_experts(name, layer.w13, layer.w2)
    assert isinstance(experts, BatchedExperts)
    batch = torch.full((held, room, layer.hidden_size), float("nan"))
    expected = []
    for expert, count in enumerate(rows):
        routed = make_tokens(layer, count, 1, seed=expert, only=range(expert, expert + 1))
        batch[expert, :count] = routed.x
        expected.append(layer.expected(type(routed)(routed.x, routed.ids, torch.ones_like(routed.weights))))
    actual = experts.run_batched(batch, torch.tensor(rows, dtype=torch.int32))
    assert actual.shape == batch.shape
    assert actual.is_contiguous()
    for expert, count in enumerate(rows):
        torch.testing.assert_close(actual[expert, :count], expected[expert], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", BATCHED)
def test_fp8_is_taken_in_both_layouts(name: str) -> None:
    """As the same experts compute over what fp8 stands for; scales may be column-major, as DeepEP's are."""
    layer = make_layer(4, hidden=256)
    experts = make_experts(name, layer.w13, layer.w2)
    routed = make_tokens(layer, 6)
    x, scales = quantize_blocks(routed.x)
    seen = dequantize_blocks(x, scales, torch.float32)
    expected = experts(seen, routed.ids, routed.weights)
    actual = experts(x, routed.ids, routed.weights, scales.t().contiguous().t())
    assert actual.dtype is torch.float32
    assert torch.equal(actual, expected)

    rows = torch.tensor([6, 0, 2, 6], dtype=torch.int32)
    batch, batch_scales = (each.expand(4, *each.shape).contiguous() for each in (x, scales))
    actual = experts.run_batched(batch, rows, batch_scales.transpose(1, 2).contiguous().transpose(1, 2))
    expected = experts.run_batched(seen.expand(4, *seen.shape).contiguous(), rows)
    for expert, count in enumerate(rows.tolist()):
        assert torch.equal(actual[expert, :count], expected[expert, :count])


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


@pytest.mark.parametrize("name", ["grouped", "reference"])
def test_bad_batches_are_refused(name: str) -> None:
    experts = make_experts(name, torch.zeros(2, 6, 4), torch.zeros(2, 4, 3))
    x, rows = torch.zeros(2, 5, 4), torch.zeros(2, dtype=torch.int32)

    def refused(match: str, x: Tensor, rows: Tensor, scales: Tensor | None = None) -> None:
        with pytest.raises(ConfigError, match=match):
            experts.run_batched(x, rows, scales)

    refused(r"must be \[2, rows, 4\] for these experts, not \[3, 5, 4\]", torch.zeros(3, 5, 4), rows)
    refused("must be contiguous", torch.zeros(2, 4, 5).transpose(1, 2), rows)
    refused(r"torch\.float64, the experts torch\.float32", x.double(), rows)
    refused(r"rows_per_expert must be \[2\] int32, not \[2\] torch\.int64", x, rows.long())
    refused(r"rows_per_expert must be \[2\] int32, not \[3\]", x, torch.zeros(3, dtype=torch.int32))
    refused("came without scales", x.to(FP8), rows)
    refused("do not fit", x, rows, torch.zeros(2, 5, 1))
    ids, weights = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    with pytest.raises(ConfigError, match="came without scales"):
        experts(x[0].to(FP8), ids, weights)


def test_what_reads_on_the_host_says_so() -> None:
    assert not FusedExperts.capturable
    assert not make_experts("grouped", torch.zeros(2, 6, 4), torch.zeros(2, 4, 3)).capturable
