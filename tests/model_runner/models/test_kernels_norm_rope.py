"""The kernels between a layer's products (norms, rope, activation) against what the models compute without them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_batches import DEVICE

from model_runner.decoder import ops
from model_runner.decoder.rope import RotaryEmbedding, Rotation
from model_runner.kernels import layer_ops
from model_runner.kernels.layer_ops import rotate_heads, sigmoid_mul, silu_mul
from model_runner.models import Rope
from ubatch import ConfigError

pytestmark = pytest.mark.triton


@pytest.fixture(autouse=True, scope="module")
def _torch_is_the_reference() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "runs_in_c", lambda *tensors: False)
        yield


CLOSE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def rounded(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Random numbers that `dtype` has: in float32 here, and in `dtype` where kernels run."""
    here = torch.randn(*shape).to(dtype)
    return here.float(), here.to(DEVICE)


def close(result: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert result.dtype == dtype
    torch.testing.assert_close(result.cpu().float(), expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@settings(max_examples=20)
@given(rows=st.integers(0, 4), size=st.integers(1, 40), eps=st.sampled_from([1e-6, 0.5]), seed=st.integers(0, 99))
def test_norm_of_rows_and_of_their_sum_with_the_residual(rows: int, size: int, eps: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, rows, size, generator=generator)
    weight = torch.randn(size, generator=generator)
    x_there, residual_there, weight_there = (t.to(DEVICE) for t in (x, residual, weight))
    close(layer_ops.rms_norm(x_there, weight_there, eps), ops.rms_norm(x, weight, eps))
    normed, summed = layer_ops.add_rms_norm(x_there, residual_there, weight_there, eps)
    expected, expected_sum = ops.add_rms_norm(x, residual, weight, eps)
    close(normed, expected)
    assert torch.equal(summed.cpu(), expected_sum)
    assert torch.equal(residual_there.cpu(), residual), "the residual is not changed"


def test_norm_of_a_slice_of_a_projection() -> None:
    wide, weight = torch.randn(5, 60), torch.rand(24)
    result = layer_ops.rms_norm(wide.to(DEVICE)[:, 20:44], weight.to(DEVICE), 1e-6)
    assert result.is_contiguous()
    close(result, ops.rms_norm(wide[:, 20:44], weight, 1e-6))


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    """As without the kernel: the residual that later layers read is what the norm was of."""
    dtype = torch.float16  # the interpreter cuts bfloat16 off, and does not round it
    (x, x_there), (residual, residual_there), (weight, weight_there) = (
        rounded(*shape, dtype=dtype) for shape in ((3, 480), (3, 480), (480,))
    )
    normed, summed = layer_ops.add_rms_norm(x_there, 100 * residual_there, weight_there, 1e-6)
    expected = (x.to(dtype) + 100 * residual.to(dtype)).float()
    assert torch.equal(summed.cpu().float(), expected)
    wanted = ops.rms_norm(expected, weight, 1e-6)
    close(normed, wanted, dtype)
    assert (normed.cpu() != wanted.to(dtype)).float().mean() < 0.02  # the sum unrounded would be off in a third


def rotation(tokens: int, head_dim: int) -> Rotation:
    embedding = RotaryEmbedding(Rope(10_000.0, attention_factor=1.3), head_dim, torch.device("cpu"))
    return embedding(torch.randint(0, 1000, (tokens,)))


def on_device(rotation: Rotation) -> tuple[Tensor, Tensor]:
    return rotation.cos.to(DEVICE), rotation.sin.to(DEVICE)


@settings(max_examples=20)
@given(
    tokens=st.integers(0, 3),
    heads=st.integers(1, 7),
    half=st.integers(1, 9),
    rest=st.sampled_from([0, 0, 1, 2, 11]),
    normed=st.booleans(),
    seed=st.integers(0, 9),
)
def test_heads_are_normalised_and_rotated_in_place(
    tokens: int, heads: int, half: int, rest: int, normed: bool, seed: int
) -> None:
    """Those of the slice, and no others; `rest` dimensions of each are not rotated."""
    torch.manual_seed(seed)
    fused = torch.randn(tokens, heads + 2, 2 * half + rest)
    weight, eps = (torch.randn(heads, 2 * half + rest), 1e-3) if normed else (None, None)
    turn, there = rotation(tokens, 2 * half), fused.clone().to(DEVICE)
    rotate_heads(there[:, :heads], *on_device(turn), None if weight is None else weight.to(DEVICE), eps)
    close(there[:, :heads], ops.normalise_and_rotate(fused[:, :heads], turn, weight, eps))
    assert torch.equal(there[:, heads:].cpu(), fused[:, heads:])


def test_more_heads_than_a_program_holds() -> None:
    fused, weight, turn = torch.randn(2, 70, 64), torch.randn(70, 64), rotation(2, 64)
    there = fused.clone().to(DEVICE)
    rotate_heads(there, *on_device(turn), weight.to(DEVICE), 1e-6)
    close(there, ops.normalise_and_rotate(fused, turn, weight, 1e-6))


def test_heads_that_cannot_be_rotated_are_refused() -> None:
    turn = on_device(rotation(2, 8))
    with pytest.raises(ConfigError, match="at most head_dim"):
        rotate_heads(torch.zeros(2, 3, 7), *turn)
    with pytest.raises(ConfigError, match="must be even"):
        rotate_heads(torch.zeros(2, 3, 7), torch.zeros(2, 1, 7), torch.zeros(2, 1, 7))
    with pytest.raises(ConfigError, match="must be dense"):
        rotate_heads(torch.zeros(2, 8, 3).transpose(1, 2), *turn)
    with pytest.raises(ConfigError, match="one of the two is missing"):
        rotate_heads(torch.zeros(2, 3, 8), *turn, torch.zeros(3, 8))


@pytest.mark.parametrize("size", [1, 24, 1500])
def test_gates_and_ups_of_a_projection(size: int) -> None:
    wide = 20 * torch.randn(3, 2 * size + 5)
    result = silu_mul(wide.to(DEVICE)[:, 5:])
    assert result.is_contiguous()
    torch.testing.assert_close(result.cpu(), ops.silu_mul(wide[:, 5:]), atol=1e-5, rtol=1e-5)
    assert silu_mul(torch.zeros(0, 8, device=DEVICE)).shape == (0, 4)


@pytest.mark.parametrize("size", [1, 24, 1500])
@pytest.mark.parametrize("gates", ["one", "all"])
def test_a_gate_on_an_output(size: int, gates: str) -> None:
    wide, x = 20 * torch.randn(3, size + 5), torch.randn(3, 2 * size)[:, size:]
    gate = wide[:, 5:6] if gates == "one" else wide[:, 5:]
    result = sigmoid_mul(gate.to(DEVICE), x.to(DEVICE))
    assert result.is_contiguous()
    torch.testing.assert_close(result.cpu(), torch.sigmoid(gate) * x, atol=1e-6, rtol=1e-5)
    assert sigmoid_mul(torch.zeros(0, 1, device=DEVICE), torch.zeros(0, 8, device=DEVICE)).shape == (0, 8)


def test_models_use_the_kernels_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """All operations, with the same results."""
    x, residual, weight = torch.randn(2, 16), torch.randn(2, 16), torch.rand(16)
    heads, weights, turn = torch.randn(2, 3, 8), torch.rand(3, 8), rotation(2, 8)
    expected = (
        ops.rms_norm(x, weight, 1e-6),
        *ops.add_rms_norm(x, residual, weight, 1e-6),
        ops.normalise_and_rotate(heads, turn, weights, 1e-6),
        ops.silu_mul(x),
        ops.sigmoid_mul(x, residual),
    )
    there = [t.to(DEVICE) for t in (x, residual, weight, heads, weights)]
    turn_there = Rotation(*on_device(turn))
    monkeypatch.setattr(ops, "_KERNELS_ON", "cpu")
    monkeypatch.setattr(ops, "_fuses", lambda x: True)
    kernel_heads = there[3].clone()
    found = (
        ops.rms_norm(there[0], there[2], 1e-6),
        *ops.add_rms_norm(there[0], there[1], there[2], 1e-6),
        ops.normalise_and_rotate(kernel_heads, turn_there, there[4], 1e-6),
        ops.silu_mul(there[0]),
        ops.sigmoid_mul(there[0], there[1]),
    )
    for result, wanted in zip(found, expected, strict=True):
        close(result, wanted)
    assert found[3].data_ptr() == kernel_heads.data_ptr(), "in place"


def test_a_cpu_never_asks_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_has_triton", lambda: pytest.fail("asked"))
    ops.rms_norm(torch.randn(2, 8), torch.ones(8), 1e-6)


# ----------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [512, 2048, 7168])
def test_norms_compiled(dtype: torch.dtype, size: int) -> None:
    (x, x_there), (residual, residual_there), (weight, weight_there) = (
        rounded(*shape, dtype=dtype) for shape in ((300, size), (300, size), (size,))
    )
    close(ops.rms_norm(x_there, weight_there, 1e-6), ops.rms_norm(x, weight, 1e-6), dtype)
    normed, summed = ops.add_rms_norm(x_there, residual_there, weight_there, 1e-6)
    expected = (x.to(dtype) + residual.to(dtype)).float()
    assert torch.equal(summed.cpu().float(), expected)
    close(normed, ops.rms_norm(expected, weight, 1e-6), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activation_compiled(dtype: torch.dtype) -> None:
    here, there = rounded(300, 2 * 1536, dtype=dtype)
    close(ops.silu_mul(there), ops.silu_mul(here), dtype)
    close(ops.sigmoid_mul(there[:, :1536], there[:, 1536:]), ops.sigmoid_mul(here[:, :1536], here[:, 1536:]), dtype)
    close(ops.sigmoid_mul(there[:, :1], there), ops.sigmoid_mul(here[:, :1], here), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [1, 2, 4])
@pytest.mark.parametrize("heads", [(36, 128), (10, 64), (72, 128)])
def test_rope_compiled(dtype: torch.dtype, heads: tuple[int, int], share: int) -> None:
    (fused, there), (weight, weight_there) = rounded(200, *heads, dtype=dtype), rounded(*heads, dtype=dtype)
    turn = rotation(200, heads[1] // share)
    wide = Rotation(turn.cos.float(), turn.sin.float())
    result = ops.normalise_and_rotate(there, Rotation(*on_device(turn)), weight_there, 1e-6)
    close(result, ops.normalise_and_rotate(fused, wide, weight, 1e-6), dtype)
