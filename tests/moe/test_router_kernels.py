"""Routers in torch, and their kernels, against a loop in float64: the same experts in the same order and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from c_kernels import needs_c
from hypothesis import example, given, settings
from hypothesis import strategies as st
from moe_layers import settings_of
from torch import Tensor
from triton_batches import DEVICE

from moe import GroupLimitedRouter, Router, SigmoidTopKRouter, SoftmaxTopKRouter, mask_padding, route
from moe import router as routers
from moe.kernels.router import route_topk
from ubatch import ConfigError

KERNELS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "torch": route,
    "triton": route_topk,
    "c": routers.route_in_c,
    "c, 8 lanes": routers.route_in_c,
}


@pytest.fixture(
    scope="module",
    params=[
        "torch",
        pytest.param("triton", marks=pytest.mark.triton),
        pytest.param("c", marks=needs_c),
        pytest.param("c, 8 lanes", marks=needs_c),
    ],
)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernel that `fused` runs; routers themselves run in torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routers, "_fuses", lambda logits: False)
        patch.setitem(KERNELS, "chosen", KERNELS[request.param])
        if "8" in request.param:
            patch.setattr(routers, "_kernel", partial(routers._kernel, LANES=8))
        yield request.param


of_each_kernel = pytest.mark.usefixtures("kernel")


def fused(router: Any, logits: Tensor, num_tokens: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the kernel gives."""
    chosen = KERNELS.get("chosen", route_topk)
    if chosen is route:
        weights, ids = route(router, logits, len(logits) if num_tokens is None else num_tokens)
    else:
        settings = settings_of(router)
        if settings.get("bias") is not None:
            settings["bias"] = settings["bias"].to(DEVICE)
        if isinstance(num_tokens, Tensor):
            num_tokens = num_tokens.to(DEVICE)
        weights, ids = chosen(logits.to(DEVICE), **settings, num_tokens=num_tokens)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    return weights.cpu(), ids.cpu()


def by_hand(router: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and experts, best first: a plain loop over tokens and groups, in float64."""
    of: dict[str, Any] = {"num_groups": 1, "top_groups": 1, "scale": 1.0, "correction_bias": None, **vars(router)}
    sigmoid = isinstance(router, SigmoidTopKRouter)
    scores = logits.double().sigmoid() if sigmoid else logits.double().softmax(-1)
    candidates = scores if of["correction_bias"] is None else scores + of["correction_bias"]
    weights, ids = torch.empty(len(logits), of["top_k"]), torch.empty(len(logits), of["top_k"], dtype=torch.int64)
    size = logits.shape[1] // of["num_groups"]
    for token, (score, choice) in enumerate(zip(scores.tolist(), candidates.tolist(), strict=True)):
        groups = [range(first, first + size) for first in range(0, len(score), size)]
        groups.sort(key=lambda group: -sum(sorted(choice[group.start : group.stop])[-2 if sigmoid else -1 :]))
        allowed = [expert for group in groups[: of["top_groups"]] for expert in group]
        ids[token] = torch.tensor(sorted(allowed, key=lambda expert: -choice[expert])[: of["top_k"]])
        chosen = scores[token, ids[token]]
        weights[token] = chosen / (chosen.sum() if of["renormalize"] else 1.0) * of["scale"]
    return weights, ids


def check(router: Router, logits: Tensor) -> None:
    weights, ids = fused(router, logits)
    expected_weights, expected_ids = by_hand(router, logits)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, atol=1e-7, rtol=1e-5)


def distinct(tokens: int, experts: int, seed: int) -> Tensor:
    """Logits of which no two of a token are close: rounding must not decide."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
    return (order - experts / 2) * (8.0 / experts) + 0.01 * torch.rand(tokens, 1, generator=generator)


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """Experts in groups, and how many of them are chosen."""
    num_groups, group_size = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    top_groups = draw(st.integers(1, num_groups))
    return {
        "experts": num_groups * group_size,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "top_k": draw(st.integers(1, top_groups * group_size)),
        "renormalize": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
    }


DEEPSEEK_V2 = {"experts": 160, "num_groups": 8, "top_groups": 3, "top_k": 6, "renormalize": False, "scale": 16.0}
DEEPSEEK_V3 = {"experts": 256, "num_groups": 8, "top_groups": 4, "top_k": 8, "renormalize": True, "scale": 2.5}


@pytest.mark.wide_sample(3)
@of_each_kernel
@settings(max_examples=20)
@given(
    choice=choices(),
    kind=st.sampled_from(["softmax", "sigmoid", "bias"]),
    tokens=st.integers(0, 6),
    seed=st.integers(0, 99),
)
@example(choice=DEEPSEEK_V2, kind="softmax", tokens=5, seed=0)
@example(choice=DEEPSEEK_V3, kind="bias", tokens=5, seed=0)
def test_groups_bias_and_scale(choice: dict[str, Any], kind: str, tokens: int, seed: int) -> None:
    choice = dict(choice)
    experts = choice.pop("experts")
    logits = distinct(tokens, experts, seed) if tokens else torch.zeros(0, experts)
    if kind == "softmax":
        check(GroupLimitedRouter(**choice), logits)
        return
    bias = None if kind == "sigmoid" else torch.randperm(experts) * 0.013
    check(SigmoidTopKRouter(**choice, correction_bias=bias), logits)


@of_each_kernel
@pytest.mark.sample(3)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (128, 8), (60, 4), (2000, 3)])
def test_softmax_top_k(experts: int, top_k: int, renormalize: bool) -> None:
    check(SoftmaxTopKRouter(top_k, renormalize), distinct(5, experts, seed=1))


@pytest.mark.long
@pytest.mark.wide_sample(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_dtype_and_stride(dtype: torch.dtype, kernel: str) -> None:
    if kernel.startswith("c") and dtype is not torch.bfloat16:
        pytest.skip("the kernel in C takes float32 and bfloat16; torch routes the others")
    wide = torch.randn(4, 2, 24).to(dtype)
    logits = wide[:, 1]
    weights, ids = fused(SoftmaxTopKRouter(3), logits)
    expected, _ = SoftmaxTopKRouter(3)(logits.float())
    torch.testing.assert_close(weights, expected)
    assert torch.equal(logits.gather(1, ids), logits.topk(3).values)
    turned = torch.randn(24, 4).to(dtype).t()
    torch.testing.assert_close(fused(SoftmaxTopKRouter(3), turned)[0], SoftmaxTopKRouter(3)(turned.float())[0])


def stable(scores: Tensor, candidates: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The k best, of equal ones those with the lower id first, and their scores."""
    ids = candidates.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return scores.gather(1, ids), ids


@pytest.mark.parametrize("seed", range(4))
def test_of_equal_experts_and_groups_the_first_are_chosen(seed: int, kernel: str) -> None:
    if kernel == "torch":
        pytest.skip("torch.topk promises no order of equal ones")
    logits = torch.randint(0, 3, (9, 32), generator=torch.Generator().manual_seed(seed)).float()
    weights, ids = fused(SoftmaxTopKRouter(6, renormalize=False), logits)
    scores = logits.softmax(-1)
    expected = stable(scores, logits, 6)
    torch.testing.assert_close(weights, expected[0])
    assert torch.equal(ids, expected[1])
    # Groups of 4: as good as their two best.
    sigmoid = logits.sigmoid()
    groups = sigmoid.view(9, 8, 4)
    best = groups.topk(2).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices[:, :3]
    outside = torch.ones(9, 8, dtype=torch.bool).scatter_(1, best, False)
    allowed = groups.masked_fill(outside[..., None], -torch.inf).view(9, 32)
    weights, ids = fused(SigmoidTopKRouter(6, 8, 3, renormalize=False), logits)
    expected = stable(sigmoid, allowed, 6)
    torch.testing.assert_close(weights, expected[0])
    assert torch.equal(ids, expected[1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of nan
def test_scores_that_underflow_stay_finite(kernel: str) -> None:
    logits = torch.full((3, 6), -300.0)
    weights, ids = fused(SigmoidTopKRouter(2), logits)
    assert weights.tolist() == [[0.0, 0.0]] * 3
    assert kernel == "torch" or ids.tolist() == [[0, 1]] * 3


@of_each_kernel
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of nan
@pytest.mark.parametrize(
    "router",
    [SoftmaxTopKRouter(2), GroupLimitedRouter(2, 4, 2, renormalize=True), SigmoidTopKRouter(2, 4, 2)],
    ids=lambda router: type(router).__name__,
)
def test_a_token_without_numbers_changes_no_other_and_chooses_different_experts(router: Any) -> None:
    """Transports have room for each token once per expert."""
    clean = torch.randn(9, 8)
    logits = clean.clone()
    logits[[1, 4, 7]] = torch.tensor([float("nan"), float("inf"), float("-inf")])[:, None]
    logits[8, 3] = float("nan")
    (weights, ids), (clean_weights, clean_ids) = fused(router, logits), fused(router, clean)
    assert ids.min() >= 0
    assert ids.max() < 8
    assert (ids[:, 0] != ids[:, 1]).all()
    others = [0, 2, 3, 5, 6]
    assert torch.equal(ids[others], clean_ids[others])
    assert torch.equal(weights[others], clean_weights[others])


@pytest.mark.wide_sample(3)
@of_each_kernel
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("on_device", [False, True], ids=["int", "tensor"])
def test_padding_goes_to_no_expert(rows: int, on_device: bool) -> None:
    router, logits = SoftmaxTopKRouter(2), distinct(rows, 8, seed=3)
    for real in range(0, rows + 1, 1 + rows // 8):
        given_as: Any = torch.tensor([real]) if on_device else real
        weights, ids = fused(router, logits, given_as)
        expected_weights, expected_ids = router(logits)
        assert torch.equal(ids, mask_padding(expected_ids, real))
        assert torch.equal(mask_padding(expected_ids, given_as), mask_padding(expected_ids, real))
        torch.testing.assert_close(weights, expected_weights)


def test_a_count_on_the_device_is_not_read_on_the_host() -> None:
    ids = torch.empty(4, 2, dtype=torch.int64, device="meta")  # of which nothing can be read
    assert mask_padding(ids, torch.empty(1, dtype=torch.int32, device="meta")).shape == (4, 2)
    for wrong in (torch.zeros(2, dtype=torch.int64), torch.zeros(1)):
        with pytest.raises(ConfigError, match="num_tokens must be one int32 or int64"):
            mask_padding(torch.zeros(4, 2, dtype=torch.int64), wrong)


class Counted:
    """A router of somebody else's, which has no kernel."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return SoftmaxTopKRouter(2)(router_logits)


def test_route_takes_the_kernel_where_it_can_and_the_router_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, own = distinct(5, 8, seed=4).to(DEVICE), SoftmaxTopKRouter(2)
    launched: list[Any] = []

    def note(router: Any, logits: Tensor, num_tokens: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
        launched.append(num_tokens)
        return fused(router, logits, num_tokens)

    expected = own(logits)[0], mask_padding(own(logits)[1], 3)
    monkeypatch.setattr(routers, "_fused", note)
    monkeypatch.setattr(routers, "_fuses", lambda logits: True)
    for result in (route(own, logits, 3), route(own, logits, torch.tensor(3, device=DEVICE))):
        torch.testing.assert_close(result[0], expected[0])
        assert torch.equal(result[1], expected[1])
    route(own, logits, 5)
    assert [x if x is None else int(x) for x in launched] == [3, 3, None]
    with pytest.raises(ConfigError, match="num_tokens = 6"):
        route(own, logits, 6)
    with pytest.raises(ConfigError, match="top_k = 9"):
        route(SoftmaxTopKRouter(9), logits, 3)
    with pytest.raises(ConfigError, match=r"correction_bias is \[3\]"):
        route(SigmoidTopKRouter(1, correction_bias=torch.zeros(3)), logits, 3)
    monkeypatch.setattr(routers, "_fuses", lambda logits: False)
    theirs = Counted()
    assert torch.equal(route(theirs, logits, 3)[1], expected[1])
    assert torch.equal(route(own, logits, 3)[1], expected[1])
    assert (theirs.calls, len(launched)) == (1, 3)


def test_a_cpu_never_asks_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "in_triton", lambda device: pytest.fail("asked"))
    SoftmaxTopKRouter(2)(torch.randn(3, 8))


# ----------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "router",
    [
        SoftmaxTopKRouter(8),
        GroupLimitedRouter(6, 8, 3, scale=16.0),
        SigmoidTopKRouter(8, 8, 4, scale=2.5, correction_bias=torch.linspace(0, 0.5, 256)),
    ],
    ids=lambda router: type(router).__name__,
)
def test_compiled(router: Any, dtype: torch.dtype) -> None:
    """Routers take the kernel on a GPU; the reference is theirs on the CPU."""
    experts = 160 if isinstance(router, GroupLimitedRouter) else 256
    logits = distinct(300, experts, seed=5).to(dtype)
    there = router
    if isinstance(router, SigmoidTopKRouter):
        there = replace(router, correction_bias=router.correction_bias.cuda())
    weights, ids = there(logits.cuda())
    expected, expected_ids = router(logits)
    torch.testing.assert_close(weights.cpu(), expected, atol=1e-6, rtol=1e-4)
    if dtype == torch.float32:
        assert torch.equal(ids.cpu(), expected_ids)


@pytest.mark.gpu
def test_a_graph_masks_another_padding_in_every_replay() -> None:
    router, logits = SoftmaxTopKRouter(2), distinct(64, 128, seed=6).cuda()
    real = torch.tensor([64], device="cuda")
    route(router, logits, real)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, ids = route(router, logits, real)
    for count in (64, 3, 40):
        real.fill_(count)
        graph.replay()
        assert (ids[:count] >= 0).all()
        assert (ids[count:] == -1).all()
