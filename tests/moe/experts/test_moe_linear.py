"""The linear layer of inference: the same numbers, whichever library computes them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from moe import PackedLinear, cpu_linear, fastest_cpu_experts, linear, make_experts, packing_pays
from moe.cpu_linear import kernel_rows
from moe.experts import cpu
from ubatch import ConfigError


@pytest.fixture(params=[True, False])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Either outcome of the measurement."""
    chosen: bool = request.param
    if chosen and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN, which its x86 builds have: nothing to choose")
    monkeypatch.setattr(cpu_linear, "_onednn_is_faster", lambda _: chosen)
    monkeypatch.setattr(cpu_linear, "_packed_is_faster", lambda _: chosen)
    return chosen


@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (7, 48), (130, 48), (2, 5, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_a_linear_layer(onednn: bool, shape: tuple[int, ...], bias: bool) -> None:
    x, weight, b = torch.randn(shape), torch.randn(3, 40, 48)[1], torch.randn(40) if bias else None
    for inputs in (x, torch.randn(*shape[:-1], 96)[..., 48:], torch.randn(*shape[:-1], 96)[..., ::2]):
        with torch.inference_mode():
            torch.testing.assert_close(linear(inputs, weight, b), F.linear(inputs, weight, b), atol=1e-4, rtol=1e-4)


def test_gradients_autocast_and_other_dtypes_are_torchs_own(onednn: bool) -> None:
    x, weight = torch.randn(4, 8), torch.randn(6, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(6, -1))
    with torch.inference_mode():
        assert linear(x.double(), weight.double()).dtype is torch.float64
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(x, weight).dtype is torch.bfloat16


ONEDNN_BF16 = cpu_linear._onednn_takes_bfloat16()
needs_onednn_bf16 = pytest.mark.skipif(not ONEDNN_BF16, reason="oneDNN has no kernels of bfloat16 for this processor")


@pytest.mark.parametrize(
    ("question", "asked"),
    [
        ("_onednn_is_faster", [True]),
        ("_onednn_is_faster", [False]),
        ("_packed_is_faster", [torch.float32]),
        pytest.param("_packed_is_faster", [torch.bfloat16], marks=needs_onednn_bf16),
    ],
)
def test_the_faster_library_is_found_by_measuring(
    question: str, asked: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([[2.0, 1.0], [1.0, 1.0]])  # torch's own, oneDNN
    monkeypatch.setattr(cpu_linear, "best_times", lambda _: next(measured))
    measure = getattr(cpu_linear, question).__wrapped__
    available = torch.backends.mkldnn.is_available()
    assert measure(*asked) is available
    assert measure(*asked) is False


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), pytest.param(torch.bfloat16, 2e-2, marks=needs_onednn_bf16)]
)
def test_a_packed_linear_layer(onednn: bool, dtype: torch.dtype, tolerance: float) -> None:
    weight = torch.randn(3, 40, 48, dtype=dtype)[1]
    packed = PackedLinear(weight)
    for rows in (0, 1, 7, 64, 130):
        x = torch.randn(rows, 48, dtype=dtype)
        torch.testing.assert_close(packed(x), F.linear(x, weight), atol=tolerance, rtol=tolerance)
    assert packing_pays(dtype, torch.device("cpu")) is onednn
    assert not packing_pays(torch.float16, torch.device("cpu"))
    assert not packing_pays(dtype, torch.device("cuda"))
    with pytest.raises(ConfigError, match=rf"takes {dtype} \[\.\.\., 48\], not {dtype} \[2, 47\]"):
        packed(torch.randn(2, 47, dtype=dtype))
    with pytest.raises(ConfigError, match=r"not torch\.float64"):
        packed(torch.randn(2, 48).double())
    with pytest.raises(ConfigError, match="no gradients"):
        packed(torch.randn(2, 48, dtype=dtype, requires_grad=True))
    with pytest.raises(ConfigError, match="only float32 weights on a CPU can be packed, and bfloat16"):
        PackedLinear(weight.half())


def test_a_processor_without_onednns_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "_onednn_takes_bfloat16", lambda: False)
    assert not packing_pays(torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ConfigError, match="bfloat16 ones where oneDNN has kernels"):
        PackedLinear(torch.randn(8, 8, dtype=torch.bfloat16))
    assert fastest_cpu_experts(torch.bfloat16, torch.device("cpu")) in ("native", "grouped")


def test_packed_experts_stay_what_they_are() -> None:
    experts = make_experts("packed", torch.randn(4, 12, 8), torch.randn(4, 8, 6))
    assert not list(experts.parameters())
    assert experts.eval().to("cpu").float() is experts
    with pytest.raises(ConfigError, match=r"cannot become torch.bfloat16 on cpu"):
        experts.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(experts)


@pytest.mark.parametrize("cached_bytes", [0, 1 << 20])
@torch.inference_mode()
def test_packed_experts_expert_by_expert_and_all_at_once(cached_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert by expert with many rows; one has none, one needs padding, one has the last rows."""
    monkeypatch.setattr(cpu, "_CACHED_BYTES", cached_bytes)
    w13, w2 = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    ids = torch.tensor([[0, 3]] * 21 + [[0, 2]] * 2)
    x, weights = torch.randn(23, 8), torch.rand(23, 2)
    expected = make_experts("reference", w13, w2)(x, ids, weights)
    torch.testing.assert_close(make_experts("packed", w13, w2)(x, ids, weights), expected, atol=1e-4, rtol=1e-4)


def test_few_numbers_of_rows_reach_onednn() -> None:
    """It keeps a kernel for each of them."""
    given = [kernel_rows(rows) for rows in range(2049)]
    assert all(rows <= padded <= max(rows + 3, rows * 1.3) for rows, padded in enumerate(given))
    assert given[:17] == list(range(17))
    assert len(set(given)) < 100


@torch.inference_mode()
def test_padding_changes_no_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN, which its x86 builds have: nothing to choose")
    monkeypatch.setattr(cpu_linear, "kernel_rows", lambda rows: seen.append(rows) or kernel_rows(rows))
    weight = torch.randn(24, 16)
    packed = PackedLinear(weight)
    for rows in (0, 1, 17, 65, 257):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(packed(x), F.linear(x, weight), atol=1e-4, rtol=1e-4)
    assert seen == [0, 1, 17, 65, 257]
