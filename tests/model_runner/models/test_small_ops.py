"""The kernels in C between a layer's products, against what torch computes."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from c_kernels import needs_c
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model_runner.decoder import ops
from model_runner.decoder.rope import RotaryEmbedding, Rotation
from model_runner.kernels import small_ops
from model_runner.models import Rope
from ubatch.kernels.sums import runs_in_c

pytestmark = needs_c

DTYPES = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # half a unit in the last place, with the bits around it


@pytest.fixture(autouse=True, params=[None, 8], ids=["the processor's vectors", "8 lanes"])
def _lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param is not None:
        monkeypatch.setattr(small_ops, "_kernels", partial(small_ops._kernels, LANES=request.param))
    return


def close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), exact, atol=1e-6, rtol=CLOSE[dtype])


def rotation(tokens: int, head_dim: int) -> Rotation:
    return RotaryEmbedding(Rope(10_000.0, attention_factor=1.3), head_dim, torch.device("cpu"))(
        torch.randint(0, 1000, (tokens,))
    )


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()


@pytest.mark.wide_sample(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (3, 5), (2, 16), (5, 17), (7, 512), (60, 600)])
def test_norms(dtype: torch.dtype, rows: int, size: int) -> None:
    wide, weight = torch.randn(2, rows, size + 3).to(dtype), torch.rand(size).to(dtype)
    x, update = wide[0, :, 3:], wide[1, :, :size]
    close(ops.rms_norm(x, weight, 1e-3), normed(x, weight, 1e-3), dtype)
    before = x.clone()
    found, summed = ops.add_rms_norm(update, x, weight, 1e-3)
    assert torch.equal(summed, update + x), "rounded before it is normalised"
    close(found, normed(summed, weight, 1e-3), dtype)
    assert found.is_contiguous()
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("rest", [0, 3, 24])
@pytest.mark.parametrize(("tokens", "heads", "half"), [(0, 2, 4), (1, 1, 1), (3, 4, 5), (2, 3, 32), (70, 8, 40)])
def test_heads(dtype: torch.dtype, with_norm: bool, rest: int, tokens: int, heads: int, half: int) -> None:
    """Those of a slice, in place, and no others; `rest` dimensions of each are not rotated."""
    fused, turn = torch.randn(tokens, heads + 2, 2 * half + rest).to(dtype), rotation(tokens, 2 * half)
    weight = torch.rand(heads, 2 * half + rest).to(dtype) if with_norm else None
    expected = fused[:, :heads].to(torch.float32, copy=True)
    if weight is not None:
        expected = normed(expected, weight, 1e-3)
    others = fused[:, heads:].clone()
    found = ops.normalise_and_rotate(fused[:, :heads], turn, weight, 1e-3 if with_norm else None)
    close(found, turn.rotate(expected), dtype)
    assert found.data_ptr() == fused.data_ptr()
    assert torch.equal(fused[:, heads:], others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 4), (1, 1), (3, 24), (40, 700)])
def test_gates(dtype: torch.dtype, rows: int, size: int) -> None:
    wide = (20 * torch.randn(rows, 2 * size + 5)).to(dtype)
    gate, up = wide[:, 5:].float().chunk(2, dim=-1)
    found = ops.silu_mul(wide[:, 5:])
    close(found, torch.nn.functional.silu(gate) * up, dtype)
    assert found.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("one_per_row", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(0, 4), (1, 1), (3, 24), (40, 700)])
def test_sigmoid_gates(dtype: torch.dtype, one_per_row: bool, rows: int, size: int) -> None:
    gates, x = (20 * torch.randn(rows, size + 5)).to(dtype)[:, 5:], torch.randn(rows, size + 3).to(dtype)[:, 3:]
    gates = gates[:, :1] if one_per_row else gates
    found = ops.sigmoid_mul(gates, x)
    close(found, torch.sigmoid(gates.float()) * x.float(), dtype)
    assert found.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 3), (1, 1), (5, 16), (4, 37), (40, 3000)])
def test_the_highest_of_a_row(dtype: torch.dtype, rows: int, size: int) -> None:
    wide = torch.randn(rows, size + 3).to(dtype)
    x = wide[:, 3:]
    place, highest = small_ops.find_highest(x)
    assert torch.equal(highest, x.amax(-1))
    assert torch.equal(x.gather(1, place[:, None])[:, 0], highest)
    for row in range(rows):
        assert int(place[row]) == x[row].tolist().index(float(highest[row])), "the first"


@pytest.mark.parametrize("size", [1, 5, 16, 40])
def test_the_highest_of_strange_numbers(size: int) -> None:
    for dtype in DTYPES:
        rows = torch.full((4, size), float("-inf"), dtype=dtype)
        rows[1, size // 2] = float("nan")
        rows[2, -1] = float("inf")
        rows[3] = 1.0
        place, highest = small_ops.find_highest(rows)
        assert place.tolist() == [0, size // 2, size - 1, 0]
        wanted = torch.tensor([-torch.inf, torch.nan, torch.inf, 1.0], dtype=dtype)
        torch.testing.assert_close(highest, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_and_on_any_threads_is_the_same(dtype: torch.dtype) -> None:
    x, update = torch.randn(2, 90, 640).to(dtype)
    weight, turn = torch.rand(640).to(dtype), rotation(90, 64)

    def results(rows: slice) -> list[Tensor]:
        own = Rotation(turn.cos[rows], turn.sin[rows])
        return [
            *ops.add_rms_norm(update[rows], x[rows], weight, 1e-6),
            ops.normalise_and_rotate(x[rows].clone().view(-1, 10, 64), own, weight.view(10, 64), 1e-6),
            ops.silu_mul(x[rows]),
        ]

    everything = results(slice(None))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        on_two = results(slice(None))
    finally:
        torch.set_num_threads(threads)
    for whole, two, alone in zip(everything, on_two, results(slice(41, 42)), strict=True):
        assert torch.equal(whole, two)
        assert torch.equal(whole[41:42], alone)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    for dtype in DTYPES:
        x, weight = torch.zeros(2, 40, dtype=dtype), torch.ones(40, dtype=dtype)
        x[1, 7] = bad
        for found in (ops.rms_norm(x, weight, 1e-6), ops.silu_mul(x)):
            assert found[0].isfinite().all()
            assert not found[1].isfinite().all()


def test_torch_computes_where_the_kernels_must_not(no_c: None) -> None:
    x = torch.randn(2, 8)
    assert not runs_in_c(x)
    close(ops.rms_norm(x, torch.ones(8), 1e-6), normed(x, torch.ones(8), 1e-6), torch.float32)


def test_what_runs_in_c() -> None:
    x = torch.randn(2, 8)
    wants = x.clone().requires_grad_()
    assert runs_in_c(x, x)
    assert not runs_in_c(x, wants)
    assert not runs_in_c(wants)
    with torch.no_grad():
        assert runs_in_c(wants)
    assert not runs_in_c(x, x.bfloat16())
    assert not runs_in_c(x.double())
    assert not runs_in_c(x.half())
    with FlopCounterMode(display=False):
        assert not runs_in_c(x), "a mode wants to see every operator"
    ops.rms_norm(wants, torch.ones(8), 1e-6).sum().backward()
    assert wants.grad is not None
