"""`grouped` and its kin against the plain loop: every load, every dtype, gradients, capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fake_graphs import FakeGraphs
from hypothesis import given
from hypothesis import strategies as st
from moe_layers import make_layer, make_tokens
from torch import Tensor

from moe import experts_backends, make_experts, register_experts_backend
from moe.experts import grouped_mm
from moe.segments import segment_offsets, segment_sum
from ubatch import ConfigError


@pytest.mark.long
@given(
    tokens=st.integers(0, 12),
    num_experts=st.integers(1, 6),
    first=st.integers(0, 4),
    spread=st.integers(1, 12),
    unrouted=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_grouped_equals_the_plain_loop(
    tokens: int, num_experts: int, first: int, spread: int, unrouted: float, seed: int, data: st.DataObject
) -> None:
    """Experts without tokens, tokens without experts, other ranks' experts, all tokens on one expert."""
    layer = make_layer(num_experts, seed=seed)
    top_k = data.draw(st.integers(1, spread))
    routed = make_tokens(layer, tokens, top_k, seed, only=range(spread), unrouted=unrouted)
    slow = make_experts("reference", layer.w13, layer.w2, first)
    expected = slow(routed.x, routed.ids, routed.weights)
    for name in ("grouped", "packed", "native"):
        actual = make_experts(name, layer.w13, layer.w2, first)(routed.x, routed.ids, routed.weights)
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


@given(
    tokens=st.integers(0, 12),
    num_experts=st.integers(1, 6),
    first=st.integers(0, 4),
    spread=st.integers(1, 12),
    unrouted=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_grouped_mm_equals_the_plain_loop(
    tokens: int, num_experts: int, first: int, spread: int, unrouted: float, seed: int, data: st.DataObject
) -> None:
    """Whatever lies behind the last group, where torch's kernel writes nothing."""
    layer = make_layer(num_experts, hidden=16, intermediate=8, seed=seed)
    routed = make_tokens(layer, tokens, data.draw(st.integers(1, spread)), seed, only=range(spread), unrouted=unrouted)
    expected = make_experts("reference", layer.w13, layer.w2, first)(routed.x, routed.ids, routed.weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_mm.F, "grouped_mm", _poisoned(F.grouped_mm))
        actual = make_experts("grouped_mm", layer.w13, layer.w2, first)(routed.x, routed.ids.int(), routed.weights)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def _poisoned(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
        out = product(rows, weights, offs=offs)
        out[int(offs[-1]) :] = float("nan")
        return out

    return call


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


@pytest.mark.gpu
def test_grouped_mm_on_a_gpu() -> None:
    """Against float32 over the same rounded numbers, and the same numbers twice."""
    layer = make_layer(8, hidden=256, intermediate=128, dtype=torch.bfloat16)
    routed = make_tokens(layer, 64, 4, only=range(2, 14))
    held = make_experts("grouped_mm", layer.w13.cuda(), layer.w2.cuda(), 4)
    given = routed.x.cuda(), routed.ids.cuda(), routed.weights.cuda()
    out = held(*given)
    exact = make_experts("reference", layer.w13.float(), layer.w2.float(), 4)
    torch.testing.assert_close(
        out.cpu().float(), exact(routed.x.float(), routed.ids, routed.weights), atol=2e-2, rtol=2e-2
    )
    assert torch.equal(out, held(*given))


def test_the_plain_loop_is_the_formula() -> None:
    """One token, one expert, written out, so that the oracle has an oracle."""
    w13 = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    w2 = torch.tensor([[[3.0], [-1.0]]])
    x = torch.tensor([[1.0, 5.0]])
    y = make_experts("reference", w13, w2, 4)(x, torch.tensor([[4, 0]]), torch.tensor([[0.5, 9.0]]))
    silu = 1.0 / (1.0 + torch.tensor(-1.0).exp().item())
    torch.testing.assert_close(y, torch.tensor([[3.0, -1.0]]) * silu * 10.0 * 0.5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 5e-2)])
def test_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    layer = make_layer(dtype=dtype)
    routed = make_tokens(layer, 9, unrouted=0.2)
    actual = make_experts("grouped", layer.w13, layer.w2)(routed.x, routed.ids.int(), routed.weights)
    assert actual.dtype is dtype
    torch.testing.assert_close(actual, layer.expected(routed), atol=tolerance, rtol=tolerance)


def test_strided_rows_and_inference_mode() -> None:
    layer = make_layer()
    routed = make_tokens(layer, 9)
    wide = torch.cat([routed.x, torch.full((9, 3), float("nan"))], dim=1)
    with torch.inference_mode():
        actual = make_experts("grouped", layer.w13, layer.w2)(wide[:, :-3], routed.ids, routed.weights)
    torch.testing.assert_close(actual, layer.expected(routed), atol=1e-6, rtol=1e-5)


def test_a_token_does_not_catch_its_neighbours_nan() -> None:
    layer = make_layer()
    routed = make_tokens(layer, 6, unrouted=0.5)
    poisoned = routed.x.clone()
    poisoned[3] = float("nan")
    ids = routed.ids.clone()
    ids[3] = torch.tensor([0, 1])
    actual = make_experts("grouped", layer.w13, layer.w2)(poisoned, ids, routed.weights)
    assert actual.isnan().any(1).tolist() == [token == 3 for token in range(6)]


def test_gradients_equal_the_plain_loop() -> None:
    layer = make_layer(4)
    routed = make_tokens(layer, 6, unrouted=0.3)
    gradients = []
    for name in ("reference", "grouped"):
        leaves = [tensor.clone().requires_grad_() for tensor in (routed.x, routed.weights, layer.w13, layer.w2)]
        x, weights, w13, w2 = leaves
        experts = make_experts(name, torch.nn.Parameter(w13), torch.nn.Parameter(w2))
        experts(x, routed.ids, weights).square().sum().backward()
        gradients.append([x.grad, weights.grad, experts.w13.grad, experts.w2.grad])
    for expected, actual in zip(*gradients, strict=True):
        assert expected is not None
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


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


def test_bad_weights_are_refused() -> None:
    w13, w2 = torch.zeros(2, 6, 4), torch.zeros(2, 4, 3)
    with pytest.raises(ConfigError, match=r"w13 \[2, 5, 4\] must be"):
        make_experts("grouped", w13[:, :5], w2)
    with pytest.raises(ConfigError, match=r"w2 must be \[2, 4, 3\] to fit w13 \[2, 6, 4\], not \[2, 3, 4\]"):
        make_experts("grouped", w13, w2.mT)
    with pytest.raises(ConfigError, match="one floating dtype"):
        make_experts("grouped", w13, w2.double())
    with pytest.raises(ConfigError, match="first_expert must be at least 0, not -1"):
        make_experts("grouped", w13, w2, -1)


@pytest.mark.parametrize("name", ["grouped", "reference"])
def test_bad_input_is_refused(name: str) -> None:
    experts = make_experts(name, torch.zeros(2, 6, 4), torch.zeros(2, 4, 3))
    x, ids, weights = torch.zeros(5, 4), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2)
    with pytest.raises(ConfigError, match=r"\[tokens, 4\] for these experts, not \[5, 3\]"):
        experts(x[:, :3], ids, weights)
    with pytest.raises(ConfigError, match=r"hidden_states are torch\.float64, the experts torch\.float32"):
        experts(x.double(), ids, weights)
    with pytest.raises(ConfigError, match=r"int32 or int64, not torch\.float32"):
        experts(x, weights, weights)
    with pytest.raises(ConfigError, match=r"topk_ids \[4, 2\]"):
        experts(x, ids[:4], weights)


def test_experts_by_name() -> None:
    assert {"grouped", "reference"} <= set(experts_backends())
    w13, w2 = torch.zeros(2, 6, 4), torch.zeros(2, 4, 3)
    with pytest.raises(ConfigError, match="unknown experts back end 'groupd'; did you mean 'grouped'"):
        make_experts("groupd", w13, w2)
    register_experts_backend("grouped", "moe.experts.grouped:GroupedExperts")  # the same again is fine
    with pytest.raises(ConfigError, match=r"registered as 'moe\.experts\.grouped:GroupedExperts' already"):
        register_experts_backend("grouped", "elsewhere:GroupedExperts")
    with pytest.raises(ConfigError, match="module:attribute', not 'elsewhere'"):
        register_experts_backend("another", "elsewhere")
