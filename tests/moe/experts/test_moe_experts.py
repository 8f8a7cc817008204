"""What `grouped`, `grouped_mm`, `flashinfer` and the plain loop have of their own, biases, and fp8.

That results are right is in the conformance tests.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from fake_graphs import FakeGraphs
from flashinfer_standin_wrappers import cutlass_fused_moe
from hypothesis import given
from hypothesis import strategies as st
from moe_layers import make_layer, make_tokens
from torch import Tensor

from moe import (
    ClampedSwiGLU,
    ExpertsNeeds,
    ExpertsShape,
    dequantize_blocks,
    experts_backends,
    make_experts,
    quantize_blocks,
    register_experts_backend,
)
from moe.experts import flashinfer, grouped_mm, registry
from moe.experts.flashinfer import FlashInferExperts, find_fused_moe
from moe.experts.quantization import FP8
from moe.experts.torch_experts import GroupedExperts
from moe.segments import segment_offsets, segment_sum
from ubatch import ConfigError


def test_grouped_mm_reads_nothing_behind_the_last_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's kernel writes nothing."""
    product = F.grouped_mm

    def poisoned(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
        out = product(rows, weights, offs=offs)
        out[int(offs[-1]) :] = float("nan")
        return out

    monkeypatch.setattr(grouped_mm.F, "grouped_mm", poisoned)
    layer = make_layer(4, hidden=16, intermediate=8)
    routed = make_tokens(layer, 9, 2, only=range(6), unrouted=0.3)
    found = make_experts("grouped_mm", layer.w13, layer.w2)(routed.x, routed.ids, routed.weights)
    torch.testing.assert_close(found, layer.expected(routed), atol=1e-6, rtol=1e-5)


def test_grouped_mm_can_be_captured() -> None:
    """Nothing is read on the host, and one capture serves every routing."""
    layer = make_layer(4, hidden=16, intermediate=8)
    experts = make_experts("grouped_mm", layer.w13, layer.w2)
    assert experts.capturable
    one, other = make_tokens(layer, 6, seed=1), make_tokens(layer, 6, seed=2, unrouted=0.5)
    held = [tensor.clone() for tensor in (one.x, one.ids, one.weights)]
    with FakeGraphs().capture() as capture:
        capture.begin()
        with capture.part():
            out = experts(*held)
        graph = capture.end()
        for routed in (other, one):
            for mine, new in zip(held, (routed.x, routed.ids, routed.weights), strict=True):
                mine.copy_(new)
            graph.replay()
            torch.testing.assert_close(out, layer.expected(routed), atol=1e-6, rtol=1e-5)


def test_grouped_mm_refuses_what_torch_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="multiples of 8, not hidden 4 and intermediate 3"):
        make_experts("grouped_mm", torch.zeros(2, 6, 4), torch.zeros(2, 4, 3))
    experts = make_experts("grouped_mm", torch.zeros(2, 16, 8).bfloat16(), torch.zeros(2, 8, 8).bfloat16())
    for capability, dtype, refused in (
        ((9, 0), torch.bfloat16, None),
        ((10, 3), torch.bfloat16, None),
        ((8, 9), torch.bfloat16, "torch.bfloat16 on 8.9"),
        ((9, 0), torch.float16, "torch.float16 on 9.0"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        experts.dtype = dtype
        if refused is None:
            experts._check_gpu()
        else:
            with pytest.raises(ConfigError, match=f"compute capability 9 and 10, not in {refused}"):
                experts._check_gpu()
    monkeypatch.delattr(grouped_mm.F, "grouped_mm")
    with pytest.raises(ConfigError, match=r"has no torch\.nn\.functional\.grouped_mm\. Install torch 2\.10"):
        make_experts("grouped_mm", torch.zeros(2, 16, 8), torch.zeros(2, 8, 8))


BF16, F16 = torch.bfloat16, torch.float16


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "first", "near"),
    [
        ("grouped_mm", BF16, 4, 2e-2),
        *(("flashinfer", dtype, first, near) for dtype, near in ((BF16, 2.0**-6), (F16, 2.0**-9)) for first in (0, 8)),
    ],
)
def test_on_a_gpu(name: str, dtype: torch.dtype, first: int, near: float) -> None:
    """Against float32 over the same rounded numbers, and the same numbers twice."""
    if name == "flashinfer":
        pytest.importorskip("flashinfer", reason="flashinfer is not installed", exc_type=ImportError)
    layer = make_layer(8, hidden=256, intermediate=128, dtype=dtype)
    routed = make_tokens(layer, 64, 4, only=range(2, 14) if name == "grouped_mm" else range(-1, 25))
    weights = routed.weights if name == "grouped_mm" else torch.rand(64, 4)
    held = make_experts(name, layer.w13.cuda(), layer.w2.cuda(), first)
    given = routed.x.cuda(), routed.ids.cuda(), weights.cuda()
    out = held(*given)
    exact = make_experts("reference", layer.w13.float(), layer.w2.float(), first)
    expected = exact(routed.x.float(), routed.ids, weights)
    torch.testing.assert_close(out.cpu().float(), expected, atol=near, rtol=near)
    assert torch.equal(out, held(*given))


def test_the_plain_loop_is_the_formula() -> None:
    """One token, one expert, written out, so that the oracle has an oracle."""
    w13 = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    w2 = torch.tensor([[[3.0], [-1.0]]])
    x = torch.tensor([[1.0, 5.0]])
    y = make_experts("reference", w13, w2, 4)(x, torch.tensor([[4, 0]]), torch.tensor([[0.5, 9.0]]))
    silu = 1.0 / (1.0 + torch.tensor(-1.0).exp().item())
    torch.testing.assert_close(y, torch.tensor([[3.0, -1.0]]) * silu * 10.0 * 0.5)


def test_segment_sum() -> None:
    rows = torch.tensor([[1.0], [10.0], [float("nan")]])
    offsets = segment_offsets(torch.tensor([2, 0, 1]))
    assert offsets.tolist() == [0, 2, 2, 3]
    index, weights = torch.tensor([1, 0, 1]), torch.tensor([1.0, 2.0, 3.0])
    assert segment_sum(rows, index, offsets).tolist() == [[11.0], [0.0], [10.0]]
    assert segment_sum(rows, index, offsets, weights).tolist() == [[12.0], [0.0], [30.0]]
    huge = torch.tensor([[1e8], [1.0], [-1e8]])  # sums follow the index, so a token's do not depend on its batch
    order = torch.tensor([0, 1, 2, 0, 2, 1])
    assert segment_sum(huge, order, segment_offsets(torch.tensor([3, 3]))).tolist() == [[0.0], [1.0]]
    nothing = segment_sum(rows[:0], index[:0], segment_offsets(torch.zeros(2, dtype=torch.int64)))
    assert nothing.tolist() == [[0.0], [0.0]]


def test_experts_by_name() -> None:
    assert {"grouped", "reference"} <= set(experts_backends())
    w13, w2 = torch.zeros(2, 6, 4), torch.zeros(2, 4, 3)
    with pytest.raises(ConfigError, match="unknown experts back end 'groupd'; did you mean 'grouped'"):
        make_experts("groupd", w13, w2)
    register_experts_backend("grouped", "moe.experts.torch_experts:GroupedExperts")  # the same again is fine
    with pytest.raises(ConfigError, match=r"registered as 'moe\.experts\.torch_experts:GroupedExperts' already"):
        register_experts_backend("grouped", "elsewhere:GroupedExperts")
    with pytest.raises(ConfigError, match="module:attribute', not 'elsewhere'"):
        register_experts_backend("another", "elsewhere")


def test_a_block_is_computed_when_it_is_asked_for() -> None:
    layer = make_layer(4)
    routed = make_tokens(layer, 30)
    experts: Any = make_experts("grouped", layer.w13, layer.w2)
    with mock.patch.object(experts, "run_expert", wraps=experts.run_expert) as run:
        blocks = experts.run_blocks(routed.x, routed.ids, routed.weights, [range(0, 1), range(1, 4)])
        assert [run.call_count for _ in blocks] == [1, 4]


LAYER = make_layer()


def test_the_plain_loop_is_the_formula_with_biases() -> None:
    x, b13, b2 = torch.randn(12), torch.randn(LAYER.w13.shape[:2]), torch.randn(LAYER.w2.shape[:2])
    clamped = ClampedSwiGLU(limit=0.4, alpha=1.5)
    experts: Any = make_experts("reference", LAYER.w13, LAYER.w2, b13=b13, b2=b2, activation=clamped)
    gate, up = (experts.w13[2] @ x + experts.b13[2]).chunk(2)
    gate, up = gate.clamp(max=0.4), up.clamp(-0.4, 0.4)
    y = experts.w2[2] @ ((up + 1) * gate / (1 + torch.exp(-1.5 * gate))) + experts.b2[2]
    weights = torch.tensor([[0.3]])
    torch.testing.assert_close(experts(x[None], torch.tensor([[2]]), weights)[0], 0.3 * y)


def test_auto_finds_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    needs, shape, cpu = ExpertsNeeds(biases=True), ExpertsShape(8, 8, 2, 16, 8), torch.device("cpu")
    assert registry.usable_experts(shape, torch.float32, cpu, needs) == {"grouped": None}
    monkeypatch.setattr(registry, "measured", lambda device: True)  # as on a GPU
    monkeypatch.setattr(registry, "_CANDIDATES", ("grouped_mm",))  # the others import Triton
    usable = registry.usable_experts(shape, torch.float32, cpu, needs)
    assert "has no biases" in str(usable["grouped_mm"])
    assert usable["grouped"] is None


def test_biases_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"b13 must be \[8, 10\]"):
        GroupedExperts(LAYER.w13, LAYER.w2, b13=torch.zeros(8, 5))
    with pytest.raises(ConfigError, match=r"b2 must be \[8, 12\] torch.float32"):
        GroupedExperts(LAYER.w13, LAYER.w2, b2=torch.zeros(8, 12, dtype=torch.float64))


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


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The stand-in on the CPU in the kernel's place; what it was called with."""
    calls: list[dict[str, Any]] = []

    def call(**kwargs: Any) -> Tensor:
        calls.append(kwargs)
        out: Tensor = cutlass_fused_moe(**kwargs)
        return out

    monkeypatch.setattr(flashinfer, "find_fused_moe", lambda: call)
    monkeypatch.setattr(FlashInferExperts, "devices", ("cpu",))
    return calls


def test_the_plain_weights_are_not_kept(stand_in: list[dict[str, Any]]) -> None:
    layer = make_layer(4, 16, 8)
    given = layer.w13.clone()
    experts = make_experts("flashinfer", layer.w13, layer.w2)
    assert torch.equal(layer.w13, given), "the caller's are left alone"
    assert {name for name, _ in experts.named_parameters()} == {"w31", "w2"}
    assert experts.capturable


def test_what_the_kernel_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "find_fused_moe", lambda: pytest.fail("looked for the kernel"))
    weights = torch.zeros(4, 16, 12), torch.zeros(4, 12, 8)
    with pytest.raises(ConfigError, match="run on cuda, not on cpu"):
        make_experts("flashinfer", *weights)
    monkeypatch.setattr(FlashInferExperts, "devices", ("cpu",))
    with pytest.raises(ConfigError, match="hidden 12 and intermediate 8"):
        make_experts("flashinfer", *weights)


def test_a_missing_or_old_flashinfer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError("no such module")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="Install flashinfer-python"):
        find_fused_moe()

    class Old:
        @staticmethod
        def cutlass_fused_moe(input: Tensor) -> None: ...

    monkeypatch.setattr(importlib, "import_module", lambda name: Old)
    with pytest.raises(ConfigError, match=r"0\.6 or later"):
        find_fused_moe()


@pytest.mark.long
def test_our_call_binds_to_the_installed_function(stand_in: list[dict[str, Any]]) -> None:
    """And its defaults are those that the stand-in was written for."""
    pytest.importorskip(
        "flashinfer", reason="flashinfer is not installed; `make test` installs it", exc_type=ImportError
    )
    theirs = inspect.signature(find_fused_moe())
    layer = make_layer(4, 16, 8)
    make_experts("flashinfer", layer.w13, layer.w2)(torch.randn(2, 16), torch.tensor([[0], [1]]), torch.rand(2, 1))
    theirs.bind(**stand_in[0])
    ours: Callable[..., Any] = cutlass_fused_moe
    for name, parameter in inspect.signature(ours).parameters.items():
        assert theirs.parameters[name].default == parameter.default
    assert int(theirs.parameters["activation_type"].default) == 3, "SwiGLU"
    assert theirs.parameters["enable_alltoall"].default is False, "rows without an expert here are written"
