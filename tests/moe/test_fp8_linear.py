"""The linear layer in fp8 against its definition in float32, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_graphs import FakeGraphs
from fp8_checkpoints import blockwise, dequantize, quantize, rounded
from torch import Tensor
from triton_batches import DEVICE  # before Triton is imported

from moe import fp8_linear, fp8_linear_block
from moe.kernels import fp8_linear as kernel
from moe.kernels.fp8_linear import LinearTile, linear_tiles
from ubatch import ConfigError, GradientError

BLOCKS = blockwise(128, 128)
TOLERANCE = 1e-5 if DEVICE == "cpu" else 1e-2
"""Of the largest result. A GPU adds products of fp8 with fewer digits, and may round a tie to the other number."""


def made(out: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in fp8 with its scales, which differ from block to block; and what they mean."""
    weight, scales = quantize(torch.randn(out, depth) * torch.rand(out, depth) * 0.1, BLOCKS)
    return weight.to(DEVICE), scales.to(DEVICE), dequantize(weight, scales, BLOCKS)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("shape", [(1, 128, 128), (5, 72, 256), (2, 9, 328, 128)], ids=str)
def test_it_is_the_product_of_what_is_rounded(
    shape: tuple[int, ...], swap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row and one tile; a last block of 72 columns; two dimensions, several tiles of rows and columns."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernel, "linear_tiles", lambda _: (LinearTile(16, 64 if swap else 128, 1, swap=swap),))
    *rows, out, depth = shape
    weight, scales, meant = made(out, depth)
    x = torch.randn(*rows, 2 * depth)[..., :depth] * torch.rand(depth)  # strided rows
    for bias in (None, torch.randn(out)):
        found = fp8_linear(x.to(DEVICE), weight, scales, None if bias is None else bias.to(DEVICE))
        expected = torch.nn.functional.linear(rounded(x), meant, bias)
        assert found.dtype == torch.float32
        assert (found.cpu() - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert (torch.nn.functional.linear(x, meant, bias) - expected).abs().max() > 1e-3, "or nothing was rounded"


def test_sums_in_bfloat16_are_rounded_after_the_bias() -> None:
    weight, scales, meant = made(128, 128)
    x, bias = torch.randn(3, 128).bfloat16(), 100 * torch.randn(128).bfloat16()
    found = fp8_linear(x.to(DEVICE), weight, scales, bias.to(DEVICE)).cpu()
    expected = rounded(x.float()) @ meant.T + bias.float()
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert (found != expected.bfloat16()).float().mean() < (0.02 if DEVICE == "cpu" else 0.2)


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Of one tile's size: also rows of padding, which may hold anything."""
    weight, scales, _ = made(128, 256)
    x = torch.randn(9, 256, device=DEVICE)
    alone = fp8_linear(x, weight, scales)
    padded = torch.cat((x, torch.full((7, 256), 1e30, device=DEVICE)))
    assert torch.equal(fp8_linear(padded, weight, scales)[:9], alone)
    assert fp8_linear(x[:0], weight, scales).shape == (0, 128)


@pytest.mark.skipif(DEVICE == "cuda", reason="records the interpreter's launches; the case below is for a GPU")
def test_a_replayed_graph_rounds_and_multiplies_anew() -> None:
    """Nothing is read on the host, and nothing of the capture's numbers is kept."""
    weight, scales, _ = made(200, 256)
    x, bias = torch.randn(20, 256), torch.randn(200)
    held = x.clone()
    with FakeGraphs().capture() as capture:
        capture.begin()
        with capture.part():
            out = fp8_linear(held, weight.cpu(), scales.cpu(), bias)
        graph = capture.end()
        for new in (3 * x, x):
            held.copy_(new)
            graph.replay()
            assert torch.equal(out, fp8_linear(new, weight.cpu(), scales.cpu(), bias))


@torch.enable_grad()
def test_what_it_refuses() -> None:
    weight, scales, _ = made(128, 256)
    x = torch.randn(2, 256, device=DEVICE)
    wrong: list[tuple[Any, str]] = [
        ((x, weight.float(), scales), r"not torch.float32 \[128, 256\] with"),
        ((x, weight, scales[:, :1]), r"float32 \[1, 1\]"),
        ((x, weight, scales.half()), "with torch.float16"),
        ((x[:, :128], weight, scales), r"\[\.\.\., 256\] on .* not torch.float32 \[2, 128\]"),
        ((x.double(), weight, scales), "float64"),
        ((x.to("meta"), weight, scales), "on meta"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ConfigError, match=message):
            fp8_linear(*arguments)
    with pytest.raises(GradientError, match="no backward"):
        fp8_linear(x.requires_grad_(), weight, scales)


def test_without_triton_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scales, _ = made(128, 128)
    monkeypatch.setattr("moe.gpu_linear.in_triton", lambda _: False)
    assert fp8_linear_block(torch.device(DEVICE)) is None
    with pytest.raises(ConfigError, match="Load the checkpoint for this device"):
        fp8_linear(torch.randn(1, 128, device=DEVICE), weight, scales)


def test_tiles_fit_a_block_and_a_tensor_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "INTERPRETED", False)
    for rows in (1, 16, 32, 64, 4096):
        tiles = linear_tiles.__wrapped__(rows)
        assert len(set(tiles)) == len(tiles) >= 4
        for tile in tiles:
            assert tile.columns <= 128
            assert 16 <= tile.rows <= 128
            assert not tile.swap or tile.columns >= 64
            assert tile.num_stages * 128 * (tile.rows + tile.columns) <= 227 << 10


@pytest.mark.gpu
def test_it_is_captured_and_every_tile_gives_the_same() -> None:
    for rows in (3, 100):
        weight, scales, meant = made(2112, 512)
        x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
        expected = rounded(x.cpu().float()) @ meant.T
        found = fp8_linear(x, weight, scales)  # tunes
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = fp8_linear(x, weight, scales)
        graph.replay()
        assert torch.equal(replayed, found)
        x8, x_scales = kernel.quantize_rows(x)
        for tile in linear_tiles(kernel.power_of_2(rows)):
            found = kernel._launch(x8, x_scales, weight, scales, torch.float32, tile)
            assert (found.cpu() - expected).abs().max() < 1e-2 * expected.abs().max()
