"""Products by every kind of instructions, against the product in float64 of the same numbers."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from c_kernels import needs_c, on_threads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe import NativeLinear, grouped_linear
from moe.experts.cpu import NativeExperts
from moe.experts.torch_experts import GroupedExperts
from moe.grouped_linear import GroupedLinear
from moe.segments import segment_offsets
from ubatch.kernels.c_jit import TILES_SOURCE, compile_c

_FLAGS = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace") if Path("/proc/cpuinfo").exists() else ""
_FLOATS, _DOTS, _TILES = range(3)


@dataclass(frozen=True)
class Kind:
    """Instructions: the defines that choose them, the processor's flag that they need, and the numbers' dtype."""

    defines: dict[str, int]
    flag: str = ""
    dtype: torch.dtype = torch.bfloat16

    @property
    def ulp(self) -> float:
        """Half the distance of two numbers is at most this, relative to a number."""
        return torch.finfo(self.dtype).eps / 2

    def drawn(self, *size: int) -> Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(self.dtype)

    def check(self, out: Tensor, x: Tensor, weight: Tensor, *, gated: bool = False) -> None:
        """Half a unit in the last place, and what sums in float32 of numbers of that magnitude lose."""
        assert out.dtype is self.dtype
        exact, magnitude = product(x, weight, gated), x.double().abs() @ weight.double().abs().T
        if gated:
            gate, up = magnitude.chunk(2, dim=-1)
            magnitude = gate * up + gate + up
        allowed = exact.abs() * self.ulp + (1e-5 if self.dtype is torch.bfloat16 else 1e-6) * magnitude
        worst = ((out.double() - exact).abs() - allowed).max() if out.numel() else torch.tensor(-1.0)
        assert worst <= 0, f"{worst} more than rounding explains"


KINDS = {
    "float32 of 8 lanes": Kind({"LANES": 8}, dtype=torch.float32),
    "float32 of 16 lanes": Kind({"LANES": 16}, dtype=torch.float32),
    "floats": Kind({"KIND": _FLOATS}),
    "floats of 8 lanes": Kind({"KIND": _FLOATS, "LANES": 8}),
    "dots": Kind({"KIND": _DOTS}, "avx512_bf16"),
    "tiles": Kind({"KIND": _TILES}, "amx_bf16"),
    "emulated tiles": Kind({"KIND": _TILES, "LANES": 16, "EMULATED_TILES": 1}),
}


pytestmark = [needs_c, pytest.mark.long]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    """The instructions that a test runs with."""
    chosen = KINDS[request.param]
    if chosen.flag not in _FLAGS:
        pytest.skip(f"this processor has no {chosen.flag}")
    if request.param == "tiles" and not compile_c(TILES_SOURCE.read_text(encoding="utf-8"), TILES=1).grants_tiles():
        pytest.skip("the system does not grant the registers of AMX")
    kernel = grouped_linear._kernel(chosen.dtype, **chosen.defines)
    monkeypatch.setattr(grouped_linear, "_kernel", lambda dtype: kernel)
    return chosen


def product(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """In float64, of the rows of one expert."""
    out = x.double() @ weight.double().T
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return out


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.one_of(st.integers(0, 40), st.just(300), st.integers(470, 500)), min_size=1, max_size=3),
    inputs=st.one_of(st.integers(1, 70), st.just(513)),
    outputs=st.integers(1, 70),
    gated=st.booleans(),
    scattered=st.booleans(),
)
def test_products_are_rounded_once(
    kind: Kind, rows: list[int], inputs: int, outputs: int, gated: bool, scattered: bool
) -> None:
    total = sum(rows)
    weight = kind.drawn(len(rows), outputs * (2 if gated else 1), inputs)
    rows_given = kind.drawn(total + 3, inputs + 5)[:, :inputs] * inputs**-0.5
    source = torch.randint(0, total + 3, (total,)) if scattered else None
    taken = rows_given[:total] if source is None else rows_given[source]
    linear, first_row = GroupedLinear(weight, gated=gated), segment_offsets(torch.tensor(rows))
    out = linear(rows_given if scattered else taken, first_row, source)
    assert out.shape == (total, outputs)
    for part, result, own in zip(taken.split(rows), out.split(rows), weight, strict=True):
        kind.check(result, part, own, gated=gated)


def test_a_thousand_rows(kind: Kind) -> None:
    """More than one block of rows."""
    weight, x = kind.drawn(1, 96, 200), kind.drawn(1000, 200)
    kind.check(GroupedLinear(weight)(x, torch.tensor([0, 1000])), x, weight[0])


def test_a_row_does_not_depend_on_its_company(kind: Kind) -> None:
    """Bit by bit: alone, in another order, from strided rows, by other experts' numbers, and by one thread or two."""
    weight, x, first_row = kind.drawn(3, 64, 100), kind.drawn(640, 100), torch.tensor([0, 13, 13, 640])
    linear, one = GroupedLinear(weight, gated=True), torch.tensor([0, 1])
    whole = linear(x, first_row)
    for threads in (1, 2):
        assert torch.equal(on_threads(threads, lambda: linear(x, first_row)), whole)
        for row in (0, 12, 13, 30, 639):
            expert, only = 0 if row < 13 else 2, x[row : row + 1]
            alone = on_threads(threads, partial(linear, only, one, first_expert=expert))
            assert torch.equal(alone[0], whole[row])
    backwards = torch.arange(639, 12, -1)
    assert torch.equal(linear(x, torch.tensor([0, 627]), backwards, first_expert=2), whole[backwards])
    strided = torch.cat([x, x], dim=1)[:, 100:]
    assert torch.equal(linear(strided, first_row), whole)


def test_nan_and_infinity_stay_in_their_row(kind: Kind) -> None:
    weight, x = kind.drawn(1, 40, 50), kind.drawn(35, 50)
    linear, rows = GroupedLinear(weight), torch.tensor([0, 35])
    clean = linear(x, rows)
    x[3, 7], x[20, 49] = torch.nan, torch.inf
    out = linear(x, rows)
    others = [row for row in range(35) if row not in (3, 20)]
    assert torch.equal(out[others], clean[others])
    assert out[3].isnan().all()
    assert not out[20].isfinite().any()


def test_the_gate_of_large_and_strange_numbers(kind: Kind) -> None:
    values = torch.tensor([0.0, -0.0, 1e-30, 1.0, -1.0, 20.0, -20.0, 87.5, -87.5, 1e4, -1e4, 1e30, -1e30])
    values = values.to(kind.dtype)
    linear = GroupedLinear(torch.eye(13).repeat(2, 1)[None].to(kind.dtype), gated=True)
    out = linear(torch.diag(values), torch.tensor([0, 13])).diagonal()
    expected = F.silu(values.double()) * values.double()
    finite = expected.abs() < 1e38
    torch.testing.assert_close(out[finite].double(), expected[finite], atol=1e-30, rtol=kind.ulp + 1e-6)
    assert out[~finite].isinf().all()
    assert linear(torch.full((1, 13), torch.nan, dtype=kind.dtype), torch.tensor([0, 1])).isnan().all()


def test_rounding_is_to_even_and_up_to_infinity(kind: Kind) -> None:
    """1 + 2^-8 and 1 + 3 * 2^-8 are between two numbers in bfloat16; the largest number, doubled, is infinite."""
    x = torch.tensor([[1.0, 2.0**-8, 0], [1.0, 3 * 2.0**-8, 0], [0, 0, 3.3895e38], [0, 0, torch.nan]]).to(kind.dtype)
    weight = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 2.0]]).to(kind.dtype)[None]
    out = GroupedLinear(weight)(x, torch.tensor([0, 4]))
    exact = [1 + 2.0**-8, 1 + 3 * 2.0**-8]
    assert out[:2, 0].tolist() == ([1.0, 1.015625] if kind.dtype is torch.bfloat16 else exact)
    assert out[2, 1] == torch.inf
    assert out[3].isnan().all()


def test_a_layer(kind: Kind) -> None:
    weight = kind.drawn(40, 24)
    layer = NativeLinear(weight)
    for shape in ((0, 24), (24,), (1, 24), (2, 9, 24), (70, 24)):
        x = kind.drawn(*shape)
        kind.check(layer(x), x, weight)
    assert torch.equal(layer(kind.drawn(24, 5).T), layer(kind.drawn(24, 5).T.contiguous()))


def reference_experts(w13: Tensor, w2: Tensor, x: Tensor, ids: Tensor, weights: Tensor, first: int) -> Tensor:
    """In float64, with results of products rounded."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, choice in ids.ne(-1).nonzero().tolist():
        slot = int(ids[row, choice]) - first
        if 0 <= slot < w13.shape[0]:
            inner = product(x[row], w13[slot], gated=True).to(x.dtype)
            out[row] += product(inner, w2[slot], gated=False).to(x.dtype) * weights[row, choice].double()
    return out


@pytest.mark.sample(4)
@pytest.mark.parametrize("hidden", [48, 64, 70])
@pytest.mark.parametrize("tokens", [0, 1, 50, 300])
@torch.inference_mode()
def test_a_layer_of_experts_in_one_call(kind: Kind, tokens: int, hidden: int) -> None:
    """The numbers of the reference and, bit by bit, of products and sums one after the other, alone and in blocks."""
    w13, w2 = kind.drawn(4, 80, hidden) / 7, kind.drawn(4, hidden, 40) / 7
    x = kind.drawn(tokens, 2 * hidden)[:, :hidden]
    ids, weights = torch.rand(tokens, 9).topk(3).indices, torch.rand(tokens, 3)
    ids[ids == 8] = -1
    experts = NativeExperts(w13, w2, first_expert=2)
    out = experts(x, ids, weights)
    assert out.is_contiguous()
    expected = reference_experts(w13, w2, x, ids, weights, first=2)
    torch.testing.assert_close(out.double(), expected, atol=5 * kind.ulp + 1e-5, rtol=2 * kind.ulp + 1e-5)
    assert torch.equal(GroupedExperts.forward(experts, x, ids, weights), out)
    assert torch.equal(on_threads(3, lambda: experts(x.contiguous(), ids.int(), weights)), out)
    blocks = torch.cat(list(experts.run_blocks(x, ids, weights, [range(3), range(3, 4)])))
    in_first = torch.where((ids == 5), 1, 0).amax(1) == 0
    assert torch.equal(blocks, torch.cat([out[in_first], out[~in_first]]))
    for row in range(0, tokens, 49):
        assert torch.equal(experts(x[row : row + 1], ids[row : row + 1], weights[row : row + 1])[0], out[row])


def test_a_kind_that_is_not_suitable_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system does not grant the registers of AMX."""
    asked: list[object] = []

    def compiled(source: str, **defines: int) -> Mock:
        asked.append(defines.get("KIND"))
        kind = defines.get("KIND", _TILES)
        answers = {"kind": kind, "suitable": kind == _FLOATS, "lanes": 16, "depth": 32}
        return Mock(**{name: Mock(return_value=value) for name, value in answers.items()})

    monkeypatch.setattr(grouped_linear, "compile_c", compiled)
    grouped_linear._kernel.__wrapped__(torch.bfloat16)
    assert asked == [None, _DOTS, _FLOATS]
