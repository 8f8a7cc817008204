"""Routers against what the models' own routers compute, and padding."""

import importlib
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from c_kernels import needs_c
from torch import Tensor

from moe import NO_EXPERT, GroupLimitedRouter, SigmoidTopKRouter, SoftmaxTopKRouter, local_experts, mask_padding
from moe import router as routers
from moe.router import route
from ubatch import ConfigError


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


def test_the_bias_decides_but_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, -3.0]])
    router = SigmoidTopKRouter(1, renormalize=False, correction_bias=torch.tensor([0.0, 0.0, 5.0]))
    weights, ids = router(logits)
    assert ids.tolist() == [[2]]
    assert weights.item() == pytest.approx(torch.sigmoid(torch.tensor(-3.0)).item())
    assert SigmoidTopKRouter(1)(logits)[1].tolist() == [[0]]
    assert router == SigmoidTopKRouter(1, renormalize=False), "the bias is a weight, not a setting"


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
    own = routers.route_in_c

    def note(logits: Tensor, top_k: int, **settings: Any) -> tuple[Tensor, Tensor]:
        taken.append(logits)
        return own(logits, top_k, **settings)

    monkeypatch.setattr(routers, "route_in_c", note)
    logits = torch.randn(4, 8)
    for router in (SoftmaxTopKRouter(2), GroupLimitedRouter(2, 4, 2), SigmoidTopKRouter(2)):
        router(logits)
        assert route(router, logits, torch.tensor(3))[1][3].tolist() == [-1, -1]
    assert len(taken) == 6
    SoftmaxTopKRouter(2)(logits.requires_grad_())[0].sum().backward()
    SoftmaxTopKRouter(2)(torch.randn(1, routers.MOST_EXPERTS + 1))
    SoftmaxTopKRouter(2)(logits.detach().double())
    assert len(taken) == 6, "torch routes those"
    assert logits.grad is not None
