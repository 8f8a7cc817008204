"""Routers against what the models' own routers compute, and padding."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from c_kernels import needs_c
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe import (
    NO_EXPERT,
    GroupLimitedRouter,
    SigmoidTopKRouter,
    SoftmaxTopKRouter,
    cpu_router,
    local_experts,
    mask_padding,
)
from moe.router import route
from ubatch import ConfigError


def by_hand(logits: list[float], top_k: int, renormalize: bool) -> tuple[list[float], list[int]]:
    """Softmax, the k largest, maybe scaled to sum 1: in Python's doubles."""
    exponentials = torch.tensor(logits, dtype=torch.float64).exp()
    probabilities = (exponentials / exponentials.sum()).tolist()
    chosen = sorted(range(len(logits)), key=lambda expert: -probabilities[expert])[:top_k]
    weights = [probabilities[expert] for expert in chosen]
    total = sum(weights) if renormalize else 1.0
    return [weight / total for weight in weights], chosen


@given(
    num_experts=st.integers(1, 9),
    tokens=st.integers(0, 4),
    renormalize=st.booleans(),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_softmax_top_k(num_experts: int, tokens: int, renormalize: bool, seed: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    logits = torch.randn(tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    weights, ids = SoftmaxTopKRouter(top_k, renormalize)(logits)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert weights.shape == ids.shape == (tokens, top_k)
    for row, token in enumerate(logits.tolist()):
        expected_weights, expected_ids = by_hand(token, top_k, renormalize)
        assert ids[row].tolist() == expected_ids
        torch.testing.assert_close(weights[row].double(), torch.tensor(expected_weights, dtype=torch.float64))


def test_low_precision_logits_are_routed_in_float32() -> None:
    logits = torch.randn(5, 8).bfloat16()
    weights, ids = SoftmaxTopKRouter(2)(logits)
    exact, exact_ids = SoftmaxTopKRouter(2)(logits.float())
    assert torch.equal(weights, exact)
    assert torch.equal(ids, exact_ids)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="top_k must be at least 1, not 0"):
        SoftmaxTopKRouter(0)
    with pytest.raises(ConfigError, match="top_k = 5 is more than the 4 experts"):
        SoftmaxTopKRouter(5)(torch.randn(2, 4))
    with pytest.raises(ConfigError, match=r"\[tokens, experts\]"):
        SoftmaxTopKRouter(1)(torch.randn(2, 3, 4))
    with pytest.raises(ConfigError, match="int64"):
        SoftmaxTopKRouter(1)(torch.zeros(2, 4, dtype=torch.int64))


# ----------------------------------------------------------------------------------- groups, sigmoid, bias, scale


def in_groups(
    scores: list[float], choice: list[float], router: GroupLimitedRouter | SigmoidTopKRouter, best: int
) -> dict[int, float]:
    """Expert -> weight of one token, in plain Python: the k best in the groups with the largest sum of `best` best."""
    size = len(scores) // router.num_groups
    groups = [range(first, first + size) for first in range(0, len(scores), size)]
    groups.sort(key=lambda group: -sum(sorted((choice[expert] for expert in group), reverse=True)[:best]))
    allowed = [expert for group in groups[: router.top_groups] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: router.top_k]
    total = sum(scores[expert] for expert in chosen) if router.renormalize else 1.0
    return {expert: scores[expert] / total * router.scale for expert in chosen}


@st.composite
def grouped(draw: st.DrawFn) -> dict[str, Any]:
    """Experts in groups, and choices that fit them."""
    num_groups, group_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    top_groups = draw(st.integers(1, num_groups))
    return {
        "num_experts": num_groups * group_size,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "top_k": draw(st.integers(1, top_groups * group_size)),
        "renormalize": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5, 16.0])),
    }


def assert_routed(weights: Tensor, ids: Tensor, expected: list[dict[int, float]]) -> None:
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert weights.shape == ids.shape
    for row, token in enumerate(expected):
        got = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert got == pytest.approx(token, rel=1e-5)


@given(settings=grouped(), tokens=st.integers(0, 4), seed=st.integers(0, 99))
def test_group_limited(settings: dict[str, Any], tokens: int, seed: int) -> None:
    logits = 3 * torch.randn(tokens, settings.pop("num_experts"), generator=torch.Generator().manual_seed(seed))
    router = GroupLimitedRouter(**settings)
    scores = torch.softmax(logits.double(), -1).tolist()
    assert_routed(*router(logits), [in_groups(token, token, router, best=1) for token in scores])


@given(settings=grouped(), tokens=st.integers(0, 4), seed=st.integers(0, 99))
def test_sigmoid_with_a_correction_bias(settings: dict[str, Any], tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_experts = settings.pop("num_experts")
    logits, bias = torch.randn(tokens, num_experts, generator=generator), torch.randn(num_experts, generator=generator)
    router = SigmoidTopKRouter(**settings, correction_bias=bias)
    scores = torch.sigmoid(logits.double())
    choices = (scores + bias).tolist()
    expected = [in_groups(*token, router, best=2) for token in zip(scores.tolist(), choices, strict=True)]
    assert_routed(*router(logits), expected)


def test_the_bias_decides_but_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, -3.0]])
    router = SigmoidTopKRouter(1, renormalize=False, correction_bias=torch.tensor([0.0, 0.0, 5.0]))
    weights, ids = router(logits)
    assert ids.tolist() == [[2]]
    assert weights.item() == pytest.approx(torch.sigmoid(torch.tensor(-3.0)).item())
    assert SigmoidTopKRouter(1)(logits)[1].tolist() == [[0]]
    assert router == SigmoidTopKRouter(1, renormalize=False), "the bias is a weight, not a setting"


def test_weights_that_underflow_stay_finite() -> None:
    weights, _ = SigmoidTopKRouter(2)(torch.full((1, 4), -300.0))
    assert weights.tolist() == [[0.0, 0.0]]


def same_choice(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    """The same experts with the same weights; transformers does not order them."""
    (our_weights, our_ids), (weights, ids) = ours, theirs
    order, our_order = ids.argsort(-1), our_ids.argsort(-1)
    assert torch.equal(our_ids.gather(1, our_order), ids.gather(1, order))
    torch.testing.assert_close(our_weights.gather(1, our_order), weights.gather(1, order))


DEEPSEEK = {"num_attention_heads": 4, "n_routed_experts": 12, "num_experts_per_tok": 3}
V2 = {**DEEPSEEK, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}
V3 = {**DEEPSEEK, "num_experts_per_tok": 5, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
FEW = {"num_experts": 6, "num_experts_per_tok": 3}
FAMILIES = {
    "v2": "deepseek_v2.DeepseekV2TopkRouter",
    "v3": "deepseek_v3.DeepseekV3TopkRouter",
    "qwen3": "qwen3_moe.Qwen3MoeTopKRouter",
    "olmoe": "olmoe.OlmoeTopKRouter",
    "mixtral": "mixtral.MixtralTopKRouter",
}


@pytest.mark.parametrize(
    ("family", "settings", "ours"),
    [
        ("v2", {**V2, "topk_method": "greedy"}, GroupLimitedRouter(3, 1, 1, scale=16.0)),
        ("v2", {**V2, "topk_method": "group_limited_greedy"}, GroupLimitedRouter(3, 4, 2, scale=16.0)),
        ("v3", {**V3, "norm_topk_prob": True}, SigmoidTopKRouter(5, 4, 2, True, 2.5)),
        ("v3", {**V3, "norm_topk_prob": False}, SigmoidTopKRouter(5, 4, 2, False, 2.5)),
        ("qwen3", {**FEW, "norm_topk_prob": True}, SoftmaxTopKRouter(3)),
        ("qwen3", {**FEW, "norm_topk_prob": False}, SoftmaxTopKRouter(3, False)),
        ("olmoe", {**FEW, "norm_topk_prob": True}, SoftmaxTopKRouter(3)),
        ("olmoe", {**FEW, "norm_topk_prob": False}, SoftmaxTopKRouter(3, False)),
        ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3}, SoftmaxTopKRouter(3)),
    ],
)
@torch.no_grad()
def test_equals_the_routers_of_transformers(family: str, settings: dict[str, Any], ours: Any) -> None:
    module, _, router = FAMILIES[family].partition(".")
    there = f"transformers.models.{module}"
    config = re.sub("Top[kK]Router", "Config", router)
    config_class = getattr(importlib.import_module(f"{there}.configuration_{module}"), config)
    gate = getattr(importlib.import_module(f"{there}.modeling_{module}"), router)(
        config_class(hidden_size=16, **settings)
    )
    torch.nn.init.normal_(gate.weight)
    if isinstance(ours, SigmoidTopKRouter):
        torch.nn.init.normal_(gate.e_score_correction_bias, std=0.3)
        ours = replace(ours, correction_bias=gate.e_score_correction_bias)
    logits, weights, ids = gate(torch.randn(50, 16))
    same_choice(ours(logits), (weights, ids))


def test_groups_that_cannot_be_are_refused() -> None:
    for kind in (GroupLimitedRouter, SigmoidTopKRouter):
        with pytest.raises(ConfigError, match="top_groups = 3 must be between 1 and the 2 groups"):
            kind(1, num_groups=2, top_groups=3)
        with pytest.raises(ConfigError, match=r"scale must be positive, not 0\.0"):
            kind(1, scale=0.0)
        with pytest.raises(ConfigError, match="top_k must be at least 1, not 0"):
            kind(0)
        with pytest.raises(ConfigError, match="7 experts cannot be cut into 2 groups"):
            kind(1, num_groups=2)(torch.randn(2, 7))
        with pytest.raises(ConfigError, match="top_k = 4 is more than the 3 experts in the 1 of 2 groups"):
            kind(4, num_groups=2, top_groups=1)(torch.randn(2, 6))
    with pytest.raises(ConfigError, match=r"correction_bias is \[3\], but there are 4 experts"):
        SigmoidTopKRouter(1, correction_bias=torch.zeros(3))(torch.randn(2, 4))


def test_padding_is_routed_nowhere() -> None:
    ids = torch.arange(6).view(3, 2)
    assert mask_padding(ids, 3) is ids
    masked = mask_padding(ids, 1)
    assert masked.tolist() == [[0, 1], [NO_EXPERT, NO_EXPERT], [NO_EXPERT, NO_EXPERT]]
    assert ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    for wrong in (-1, 4):
        with pytest.raises(ConfigError, match=f"num_tokens = {wrong}"):
            mask_padding(ids, wrong)


def test_experts_are_placed_in_blocks() -> None:
    assert [local_experts(6, rank, 3) for rank in range(3)] == [range(0, 2), range(2, 4), range(4, 6)]
    with pytest.raises(ConfigError, match=r"6 experts do not divide by 4 ranks.*8 slots"):
        local_experts(6, 0, 4)
    with pytest.raises(ConfigError, match="rank 2 is not one of 2 ranks"):
        local_experts(6, 2, 2)


@needs_c
def test_routers_on_a_cpu_take_the_kernel_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    own = cpu_router.route_topk

    def note(logits: Tensor, top_k: int, **settings: Any) -> tuple[Tensor, Tensor]:
        taken.append(logits)
        return own(logits, top_k, **settings)

    monkeypatch.setattr(cpu_router, "route_topk", note)
    logits = torch.randn(4, 8)
    for router in (SoftmaxTopKRouter(2), GroupLimitedRouter(2, 4, 2), SigmoidTopKRouter(2)):
        router(logits)
        assert route(router, logits, torch.tensor(3))[1][3].tolist() == [-1, -1]
    assert len(taken) == 6
    SoftmaxTopKRouter(2)(logits.requires_grad_())[0].sum().backward()
    SoftmaxTopKRouter(2)(torch.randn(1, cpu_router.MOST_EXPERTS + 1))
    SoftmaxTopKRouter(2)(logits.detach().double())
    assert len(taken) == 6, "torch routes those"
    assert logits.grad is not None
