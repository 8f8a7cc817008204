"""Every registered experts back end against the plain loop, in all that it says it serves; and one that breaks this.

A back end that is registered is tested here. What only one of them has is in the tests of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from flashinfer_standin_wrappers import cutlass_fused_moe
from moe_layers import Layer, Routed, make_layer, make_tokens
from torch import Tensor, nn
from triton_batches import DEVICE

from moe import (
    BatchedExperts,
    BlockwiseExperts,
    ClampedSwiGLU,
    dequantize_blocks,
    experts_backends,
    experts_class,
    make_experts,
    quantize_blocks,
    register_experts_backend,
)
from moe.experts import flashinfer
from moe.experts.flashinfer import FlashInferExperts
from moe.experts.torch_experts import GroupedExperts
from ubatch import ConfigError, GradientError
from ubatch.kernels.c_jit import why_not_c

# numpy's warnings, in Triton's interpreter
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

FP8 = torch.float8_e4m3fn
BATCHES_ONLY = {"triton_batched"}
OTHER_DTYPES = {"grouped": torch.float64, "reference": torch.float64} | dict.fromkeys(
    ("grouped_mm", "native", "triton"), torch.bfloat16
)
CLAMPED = ClampedSwiGLU(limit=0.4, alpha=1.5)


STAND_INS = {"static_dense"}
"""Tests of graphs register it, for their one shape."""


@pytest.fixture(params=sorted(set(experts_backends()) - STAND_INS))
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A back end that can run here; flashinfer's kernel is a stand-in."""
    chosen: str = request.param
    if chosen == "native" and why_not_c():
        pytest.skip("needs a C compiler")
    if "triton" in chosen:
        pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    with (
        mock.patch.object(flashinfer, "find_fused_moe", return_value=cutlass_fused_moe),
        mock.patch.object(FlashInferExperts, "devices", ("cpu",)),
    ):
        yield chosen


def device_of(name: str) -> str:
    return DEVICE if "triton" in name else "cpu"


def small(num_experts: int = 4, hidden: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32) -> Layer:
    """A layer of a size that all take."""
    return make_layer(num_experts, hidden, 8, seed, dtype)


def made(name: str, layer: Layer, first: int = 0, **options: Any) -> Any:
    there = device_of(name)
    moved = {key: each.to(there) if isinstance(each, Tensor) else each for key, each in options.items()}
    return make_experts(name, layer.w13.to(there, copy=True), layer.w2.to(there, copy=True), first, **moved)


def run(name: str, experts: Any, *given: Tensor | None) -> Tensor:
    there = device_of(name)
    return experts(*(each if each is None else each.to(there) for each in given)).cpu()


def same(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# --------------------------------------------------------------------------------------------------- what all promise

LOADS = [
    # tokens, experts, first, spread, top_k, unrouted
    (9, 4, 0, 4, 2, 0.0),
    (0, 4, 0, 4, 2, 0.0),
    (1, 1, 0, 1, 1, 0.0),
    (12, 6, 3, 12, 3, 0.3),  # other ranks' experts on both sides
    (7, 3, 4, 4, 2, 0.0),  # only other ranks' experts
    (5, 4, 0, 4, 2, 1.0),
    (40, 5, 1, 9, 4, 0.1),
    (33, 6, 0, 1, 1, 0.0),  # one expert gets everything
]


def rows(name: str) -> None:
    """Tokens in every load, whose ids are of either dtype; zeros for those without an expert here."""
    if name in BATCHES_ONLY:
        with pytest.raises(ConfigError, match="take rows in batches"):
            run(name, made(name, small()), torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
        return
    for seed, (tokens, num_experts, first, spread, top_k, unrouted) in enumerate(LOADS):
        layer = small(num_experts, seed=seed)
        routed = make_tokens(layer, tokens, top_k, seed, range(spread), unrouted)
        routed.ids[: tokens // 4, 0] = 99  # nobody's
        expected = make_experts("reference", layer.w13, layer.w2, first)(routed.x, routed.ids, routed.weights)
        experts = made(name, layer, first)
        assert experts.expert_range == range(first, first + num_experts)
        for ids in (routed.ids, routed.ids.int()):
            same(run(name, experts, routed.x, ids, routed.weights), expected)


def views(name: str) -> None:
    """Strided rows, columns of ids and weights, turned ones; weights that do not lie densely."""
    if name in BATCHES_ONLY:
        return
    layer = small()
    routed = make_tokens(layer, 6, 3, unrouted=0.2)
    experts = made(name, Layer(layer.w13.mT.contiguous().mT, layer.w2.mT.contiguous().mT))
    wide = torch.cat([routed.x, torch.full_like(routed.x, float("nan"))], dim=1).to(device_of(name))
    ids, weights = (each.to(device_of(name)) for each in (routed.ids, routed.weights))
    for cut in (slice(0, 3), slice(1, 2)):
        expected = layer.expected(Routed(routed.x, routed.ids[:, cut], routed.weights[:, cut]))
        same(experts(wide[:, :16], ids[:, cut], weights[:, cut]).cpu(), expected)
    turned = (each.t().contiguous().t() for each in (ids, weights))
    same(experts(wide[:, :16], *turned).cpu(), layer.expected(routed))


def tokens_apart(name: str) -> None:
    """A token's numbers do not depend on its company; not a bit where another's are nan or infinite."""
    if name in BATCHES_ONLY:
        return
    layer = small()
    routed = make_tokens(layer, 20, 2, unrouted=0.2)
    experts = made(name, layer)
    x, weights, ids = routed.x.clone(), routed.weights.clone(), routed.ids.clone()
    ids[[1, 4]], ids[7] = torch.tensor([0, 1]), -1
    x[1], x[4], x[7], weights[4] = float("nan"), float("inf"), float("nan"), float("inf")
    clean, found = run(name, experts, routed.x, ids, routed.weights), run(name, experts, x, ids, weights)
    others = [row for row in range(20) if row not in (1, 4)]
    assert torch.equal(found[others], clean[others])
    assert not found[7].any()
    assert found[1].isnan().all()
    # The interpreter multiplies with numpy, which on some processors rounds a row by its place in the tile.
    same(run(name, experts, routed.x[7:19], ids[7:19], routed.weights[7:19]), clean[7:19], 5e-6)


def dtypes(name: str) -> None:
    dtype = OTHER_DTYPES.get(name)
    if dtype is None:
        return
    layer = small(dtype=dtype)
    routed = make_tokens(layer, 9, unrouted=0.2)
    actual = run(name, made(name, layer), routed.x, routed.ids, routed.weights)
    assert actual.dtype is dtype
    exact = Layer(layer.w13.double(), layer.w2.double()).expected(
        Routed(routed.x.double(), *(routed.ids, routed.weights))
    )
    same(actual.double(), exact, 1e-6 if dtype is torch.float64 else 3e-2)


def fp8(name: str) -> None:
    """As the same experts compute over what fp8 stands for; scales may be column-major, as DeepEP's are."""
    layer = small(hidden=256)
    experts, routed = made(name, layer), make_tokens(layer, 6)
    x, scales = quantize_blocks(routed.x)
    seen = dequantize_blocks(x, scales, torch.float32)
    if name not in BATCHES_ONLY:
        actual = run(name, experts, x, routed.ids, routed.weights, scales.t().contiguous().t())
        same(actual, run(name, experts, seen, routed.ids, routed.weights), 1e-6)
    if isinstance(experts, BatchedExperts):
        counts = torch.tensor([6, 0, 2, 6], dtype=torch.int32)
        batch, batch_scales = (each.expand(4, *each.shape).contiguous() for each in (x, scales))
        turned = batch_scales.transpose(1, 2).contiguous().transpose(1, 2)
        found = run(name, experts.run_batched, batch, counts, turned)
        expected = run(name, experts.run_batched, seen.expand(4, *seen.shape).contiguous(), counts)
        for expert, count in enumerate(counts.tolist()):
            same(found[expert, :count], expected[expert, :count], 1e-6)


def batches(name: str) -> None:
    """Every row is what its expert makes of it alone; rows behind the counts are NaN, and nobody sees it."""
    experts = made(name, small(3))
    if not isinstance(experts, BatchedExperts):
        return
    for counts, capacity in (((0, 0, 0), 4), ((3, 0, 20), 20), ((1, 33, 7), 40), ((0, 0, 1), 1), ((0, 0, 0), 0)):
        batch = torch.full((3, capacity, 16), float("nan"))
        for expert, count in enumerate(counts):
            batch[expert, :count] = torch.randn(count, 16)
        actual = run(name, experts.run_batched, batch, torch.tensor(counts, dtype=torch.int32))
        assert actual.shape == batch.shape
        assert actual.is_contiguous()
        for expert, count in enumerate(counts):
            ids = torch.full((count, 1), expert)
            expected = small(3).expected(Routed(batch[expert, :count], ids, torch.ones(count, 1)))
            same(actual[expert, :count], expected)


def blocks(name: str) -> None:
    """Every row comes with its last expert, and with the first block if it has none here."""
    layer = small(6)
    experts = made(name, layer, 2)
    if not isinstance(experts, BlockwiseExperts):
        return
    loads = (9, None, 0.0), (9, None, 0.6), (4, range(1), 0.0), (3, None, 1.0), (0, None, 0.0)
    for cuts in ((0, 6), (0, 1, 3, 6), (0, 1, 2, 3, 4, 5, 6)):
        parted = [range(start, stop) for start, stop in pairwise(cuts)]
        for tokens, only, unrouted in loads:
            routed = make_tokens(layer, tokens, 2 if only is None else 1, only=only, unrouted=unrouted)
            ids = torch.where(routed.ids >= 0, routed.ids + 1, -1)  # one more below, one fewer above
            last = [
                max([0, *(n for n, part in enumerate(parted) for s in row if s - 2 in part)]) for row in ids.tolist()
            ]
            whole = experts(routed.x, ids, routed.weights)
            parts = list(experts.run_blocks(routed.x, ids, routed.weights, parted))
            assert len(parts) == len(parted)
            for number, part in enumerate(parts):
                same(part, whole[[row for row, block in enumerate(last) if block == number]])


def biases(name: str) -> None:
    """With biases and a clamped activation in every layout, or refused by name."""
    layer, generator = small(8), torch.Generator().manual_seed(3)
    b13, b2 = (torch.randn(each.shape[:2], generator=generator) for each in (layer.w13, layer.w2))
    options: dict[str, Any] = {"b13": b13[3:7], "b2": b2[3:7], "activation": CLAMPED}
    held = Layer(layer.w13[3:7], layer.w2[3:7])
    if "b13" not in inspect.signature(experts_class(name)).parameters:
        with pytest.raises(ConfigError, match=f"{name!r} has no biases and no clamped activation.*Choose 'grouped'"):
            made(name, held, 3, **options)
        return
    experts, reference = made(name, held, 3, **options), make_experts("reference", held.w13, held.w2, 3, **options)
    routed = make_tokens(layer, 30, 3)
    given = routed.x, routed.ids, routed.weights
    same(experts(*given), reference(*given))
    counts, batch = torch.tensor([0, 1, 2, 3], dtype=torch.int32), torch.randn(4, 4, 16)
    one, other = experts.run_batched(batch, counts), reference.run_batched(batch, counts)
    for slot, count in enumerate(counts.tolist()):
        same(one[slot, :count], other[slot, :count])


@torch.enable_grad()
def gradients(name: str) -> None:
    """The plain loop's, of tokens and of all weights; or refused."""
    if name in BATCHES_ONLY:
        return
    layer = small()
    routed = make_tokens(layer, 6, unrouted=0.3)
    found: list[list[Tensor | None]] = []
    for kind in ("reference", name):
        leaves = [each.clone().requires_grad_() for each in (routed.x, routed.weights, layer.w13, layer.w2)]
        try:
            experts = make_experts(kind, *(nn.Parameter(each.to(device_of(kind))) for each in leaves[2:]))
            output = experts(
                leaves[0].to(device_of(kind)), routed.ids.to(device_of(kind)), leaves[1].to(device_of(kind))
            )
        except (ConfigError, GradientError):
            assert kind == name
            return
        assert output.requires_grad, "gradients were lost"
        output.square().sum().backward()
        found.append([leaves[0].grad, leaves[1].grad, experts.w13.grad, experts.w2.grad])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def refusals(name: str) -> None:
    """Weights and inputs that do not fit; before anything is computed."""
    w13, w2 = torch.zeros(2, 16, 16), torch.zeros(2, 16, 8)
    for bad, complaint in (
        ((w13[:, :5], w2), r"w13 \[2, 5, 16\] must be"),
        ((w13, w2.mT), r"w2 must be \[2, 16, 8\] to fit w13 \[2, 16, 16\], not \[2, 8, 16\]"),
        ((w13, w2.double()), "one floating dtype"),
        ((w13, w2, -1), "first_expert must be at least 0, not -1"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            make_experts(name, *(each.to(device_of(name)) if isinstance(each, Tensor) else each for each in bad))
    experts = made(name, Layer(w13, w2))
    x, ids, weights = torch.zeros(5, 16), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2)
    bad_rows: list[tuple[tuple[Tensor, ...], str]] = [
        ((x[:, :3], ids, weights), r"\[tokens, 16\] for these experts, not \[5, 3\]"),
        ((x.half(), ids, weights), r"hidden_states are torch\.float16, the experts torch\.float32"),
        ((x.to(FP8), ids, weights), "came without scales"),
        ((x, weights, weights), r"int32 or int64, not torch\.float32"),
        ((x, ids[:4], weights), r"topk_ids \[4, 2\]"),
    ]
    batch, counts = torch.zeros(2, 5, 16), torch.zeros(2, dtype=torch.int32)
    bad_batches: list[tuple[tuple[Tensor, ...], str]] = [
        ((torch.zeros(3, 5, 16), counts), r"must be \[2, rows, 16\] for these experts, not \[3, 5, 16\]"),
        ((torch.zeros(2, 16, 5).transpose(1, 2), counts), "must be contiguous"),
        ((batch.half(), counts), r"torch\.float16, the experts torch\.float32"),
        ((batch, counts.long()), r"rows_per_expert must be \[2\] int32, not \[2\] torch\.int64"),
        ((batch, torch.zeros(3, dtype=torch.int32)), r"rows_per_expert must be \[2\] int32, not \[3\]"),
        ((batch.to(FP8), counts), "came without scales"),
        ((batch, counts, torch.zeros(2, 5, 1)), "do not fit"),
    ]
    wrong = [(experts, *each) for each in bad_rows if name not in BATCHES_ONLY]
    if isinstance(experts, BatchedExperts):
        wrong += [(experts.run_batched, *each) for each in bad_batches]
    for call, given, complaint in wrong:
        with torch.no_grad(), pytest.raises(ConfigError, match=complaint):
            run(name, call, *given)


CHECKS = (rows, views, tokens_apart, dtypes, fp8, batches, blocks, biases, gradients, refusals)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@torch.no_grad()
def test_contract(name: str, check: Callable[[str], None]) -> None:
    check(name)


# ---------------------------------------------------------------------------------------------------- broken back ends


class Unweighted(GroupedExperts):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor | None = None) -> Tensor:
        return super().forward(x, ids, torch.ones_like(weights), scales)


class TakesAllIds(GroupedExperts):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor | None = None) -> Tensor:
        return super().forward(x, ids % len(self.expert_range) + self.expert_range.start, weights, scales)


class IgnoresStrides(GroupedExperts):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor | None = None) -> Tensor:
        return super().forward(x.as_strided(x.shape, (x.shape[1], 1)), ids, weights, scales)


class MixesTokens(GroupedExperts):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor | None = None) -> Tensor:
        return super().forward(x + 0 * x.sum(0), ids, weights, scales)


class IgnoresScales(GroupedExperts):
    def dequantized(self, hidden_states: Tensor, scales: Tensor | None) -> Tensor:
        return hidden_states if scales is None else hidden_states.float()


class ReadsPadding(GroupedExperts):
    def run_batched(self, hidden_states: Tensor, rows_per_expert: Tensor, scales: Tensor | None = None) -> Tensor:
        return super().run_batched(hidden_states - hidden_states.mean((0, 1)), rows_per_expert, scales)


class SendsEarly(GroupedExperts):
    def run_blocks(self, *given: Any, **more: Any) -> Iterator[Tensor]:
        parts = list(super().run_blocks(*given, **more))
        yield from reversed(parts)


class IgnoresBiases(GroupedExperts):
    def __init__(self, w13: Tensor, w2: Tensor, first: int, *, b13: Any = None, b2: Any = None, activation: Any = None):
        super().__init__(w13, w2, first, activation=activation)


class LosesGradients(GroupedExperts):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor | None = None) -> Tensor:
        return super().forward(x.detach(), ids, weights, scales)


class ChecksNothing(GroupedExperts):
    def check_input(self, *given: Any) -> None:
        return


BROKEN: dict[type[GroupedExperts], Callable[[str], None]] = {
    Unweighted: rows,
    TakesAllIds: rows,
    IgnoresStrides: views,
    MixesTokens: tokens_apart,
    IgnoresScales: fp8,
    ReadsPadding: batches,
    SendsEarly: blocks,
    IgnoresBiases: biases,
    LosesGradients: gradients,
    ChecksNothing: refusals,
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
@torch.no_grad()
def test_one_that_breaks_the_contract_is_found(broken: type[GroupedExperts]) -> None:
    register_experts_backend(broken.__name__, f"{__name__}:{broken.__name__}")
    with pytest.raises((AssertionError, RuntimeError, IndexError, pytest.fail.Exception)):
        BROKEN[broken](broken.__name__)
