"""Triton experts in graphs and in fp8; against the plain loop they are in the conformance tests.

Without a GPU shapes are small, and tiles too. With one, the same tests run compiled; `test_moe_triton_gpu` adds the
dtypes, sizes and tiles that only a GPU has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_checkpoints import blockwise, dequantize, rounded
from graph_cases import graphed
from moe_layers import Layer, Routed, make_layer, make_tokens
from torch import Tensor
from triton_batches import DEVICE

from moe import make_experts, quantize_blocks
from moe.experts.triton import TritonExperts
from moe.kernels.grouped_gemm import reference_project_down, reference_project_up
from moe.kernels.quantize import BLOCK, quantize_weights
from ubatch import ConfigError, GradientError, dbo_yield


def on_device(name: str, layer: Layer, first: int = 0, **options: Any) -> Any:
    return make_experts(name, layer.w13.to(DEVICE), layer.w2.to(DEVICE), first, **options)


def run(experts: Any, routed: Routed, x: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
    x, ids = routed.x if x is None else x, routed.ids if ids is None else ids
    return experts(x.to(DEVICE), ids.to(DEVICE), routed.weights.to(DEVICE)).cpu()


def batches(layer: Layer, rows: list[int], capacity: int) -> tuple[Tensor, Tensor]:
    """`[E, capacity, H]` with NaN behind the rows, and how many there are."""
    x = torch.full((layer.num_experts, capacity, layer.hidden_size), float("nan"))
    for expert, count in enumerate(rows):
        x[expert, :count] = torch.randn(count, layer.hidden_size)
    return x.to(DEVICE), torch.tensor(rows, dtype=torch.int32, device=DEVICE)


class Routing(torch.nn.Module):
    """A router, and experts in one of both layouts."""

    def __init__(self, layer: Layer, batched: bool) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(layer.hidden_size, layer.num_experts)
        self.experts = make_experts("triton_batched" if batched else "triton", layer.w13, layer.w2)
        self.batched = batched

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(1).topk(2)
        dbo_yield()
        if not self.batched:
            return x + self.experts(x, ids, weights)
        counts = (ids == torch.arange(self.gate.out_features, device=x.device)[:, None, None]).sum((1, 2)).int()
        batch = x.expand(len(counts), *x.shape).contiguous()
        y = self.experts.run_batched(batch, counts.clamp(max=len(x)))
        filled = torch.arange(len(x), device=x.device) < counts[:, None]
        return x + torch.where(filled[:, :, None], y, 0.0).sum(0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("batched", [False, True], ids=["tokens", "batches"])
def test_a_graph_of_two_lanes_follows_the_routing(batched: bool) -> None:
    """Nothing is read on the host, and nothing of a captured routing stays."""
    with graphed(Routing(make_layer(4, 8, 20), batched), device=DEVICE, num_ubatches=2) as case, torch.no_grad():
        case.wrapper.capture(case.x(12))
        for scale in (1.0, 30.0, -30.0):  # few experts get almost everything
            x = scale * case.x(12)
            torch.testing.assert_close(case.wrapper(x), case.eager(x))
        assert case.wrapper.statistics().graph_replays == 3


# ----------------------------------------------------------------------------------------------------------------- fp8


def quantized(layer: Layer, first: int = 0, name: str = "triton") -> Any:
    (w13, w13_scale), (w2, w2_scale) = quantize_weights(layer.w13), quantize_weights(layer.w2)
    fp8 = {"w13_scale": w13_scale.to(DEVICE), "w2_scale": w2_scale.to(DEVICE), "dtype": torch.float32}
    return make_experts(name, w13.to(DEVICE), w2.to(DEVICE), first, **fp8)  # type: ignore[arg-type]


def expected_fp8(layer: Layer, x: Tensor, expert: int) -> Tensor:
    """One expert's rows, with every operand rounded as the kernels round it."""
    w13, w2 = (
        dequantize(*(each[0] for each in quantize_weights(w[expert : expert + 1])), blockwise(BLOCK, BLOCK))
        for w in (layer.w13, layer.w2)
    )
    return reference_project_down(rounded(reference_project_up(rounded(x), w13)), w2)


def check_fp8(found: Tensor, expected: Tensor) -> None:
    """Sums in another order may move a number to the next fp8, so as a whole."""
    assert (found - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("arrives", ["as it is", "in fp8"])
def test_fp8_weights_and_activations(arrives: str) -> None:
    layer = make_layer(3, 256, 128)
    routed = make_tokens(layer, 20, 2, unrouted=0.2)
    experts = quantized(layer)
    if arrives == "in fp8":
        x, scales = quantize_blocks(routed.x)
        actual = experts(x.to(DEVICE), routed.ids.to(DEVICE), routed.weights.to(DEVICE), scales.to(DEVICE)).cpu()
    else:
        actual = run(experts, routed)
    expected = torch.zeros(20, 256)
    for expert in range(3):
        weight = torch.where(routed.ids == expert, routed.weights, 0.0).sum(1, keepdim=True)
        expected += weight * expected_fp8(layer, routed.x, expert)
    assert actual.dtype is torch.float32
    check_fp8(actual, expected)


@pytest.mark.parametrize("arrives", ["as it is", "in fp8"])
def test_fp8_batches(arrives: str) -> None:
    layer = make_layer(3, 256, 128)
    rows = [18, 0, 3]
    x, counts = batches(layer, rows, 20)
    scales = None
    arrived = x
    if arrives == "in fp8":
        arrived, scales = quantize_blocks(x.nan_to_num())
        scales = scales.transpose(1, 2).contiguous().transpose(1, 2)  # as DeepEP's are: rows densely
    found = quantized(layer, name="triton_batched").run_batched(arrived, counts, scales).cpu()
    for expert, count in enumerate(rows):
        if count:
            check_fp8(found[expert, :count], expected_fp8(layer, x[expert, :count].cpu(), expert))


def test_quantize_is_the_same_as_fp8_weights() -> None:
    layer = make_layer(2, 128, 128)
    routed = make_tokens(layer, 5)
    ours = on_device("triton", layer, quantize="fp8")
    assert ours.w13.dtype is torch.float8_e4m3fn
    assert torch.equal(run(ours, routed), run(quantized(layer), routed))


# ------------------------------------------------------------------------------------------------------------ refusals


def test_bad_weights_are_refused() -> None:
    w13, w2 = torch.zeros(2, 256, 128), torch.zeros(2, 128, 128)
    (fp8_13, scale_13), (fp8_2, scale_2) = quantize_weights(w13), quantize_weights(w2)
    fp8 = r"torch\.float8_e4m3fn"
    refused: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((w13.double(), w2.double()), {}, r"float32 or fp8, not in torch\.float64"),
        ((fp8_13, fp8_2), {}, r"w13_scale \[2, 2, 1\] float32, not None"),
        ((fp8_13, fp8_2, 0, scale_13, scale_13), {}, r"w2_scale \[2, 1, 1\] float32, not torch\.float32 \[2, 2, 1\]"),
        ((w13, w2, 0, scale_13, scale_2), {}, rf"w13_scale is for weights in {fp8}, not torch\.float32"),
        ((fp8_13[:, :, :96], fp8_2[:, :96], 0, scale_13, scale_2), {}, "multiples of 128, not hidden 96 and"),
        ((w13, w2), {"dtype": torch.bfloat16}, r"dtype=torch\.bfloat16 is for fp8"),
        ((w13, w2), {"quantize": "int4"}, r"quantize must be 'fp8'.* not 'int4'"),
        ((w13, w2, 3), {"num_experts": 4}, "num_experts is 4, but experts 3 to 4 are here"),
    ]
    for given, options, message in refused:
        with pytest.raises(ConfigError, match=message):
            TritonExperts(*given, **options)
    with pytest.raises(ConfigError, match=r"in blocks of 128 x 128, not torch\.float32 \[2, 128, 96\]"):
        quantize_weights(w2[:, :, :96])
    with pytest.raises(ConfigError, match="'grouped' does not compute in fp8 and takes no quantize, w2_scale"):
        make_experts("grouped", w13, w2, quantize="fp8", w2_scale=scale_2)
    make_experts("grouped", w13, w2, num_experts=8)  # a hint, for who can use it


def test_bad_input_is_refused() -> None:
    layer = make_layer(2, 32, 20)
    experts = on_device("triton", layer)
    routed = make_tokens(layer, 4)
    with pytest.raises(ConfigError, match="hidden_states are on meta, the experts on"):
        experts(routed.x.to("meta"), routed.ids, routed.weights)
    with pytest.raises(GradientError, match="no backward"):
        run(experts, routed, routed.x.requires_grad_())
    with torch.no_grad():
        run(experts, routed)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.experts.triton_batched.INTERPRETED", False)
    layer = make_layer(2, 32, 20)
    routed = make_tokens(layer, 4)
    with pytest.raises(ConfigError, match="triton experts run on CUDA, not on cpu"):
        make_experts("triton", layer.w13, layer.w2)(routed.x, routed.ids, routed.weights)
