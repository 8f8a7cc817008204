"""Routers against what the models' own routers compute, and padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe import NO_EXPERT, SoftmaxTopKRouter, local_experts, mask_padding
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


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_equals_the_routers_of_transformers(norm_topk_prob: bool) -> None:
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    hidden, x = 16, torch.randn(7, 16)
    qwen = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=hidden, num_experts=6, num_experts_per_tok=3, norm_topk_prob=norm_topk_prob)
    )
    mixtral = MixtralTopKRouter(MixtralConfig(hidden_size=hidden, num_local_experts=6, num_experts_per_tok=3))
    for gate, renormalize in ((qwen, norm_topk_prob), (mixtral, True)):
        torch.nn.init.normal_(gate.weight)
        with torch.no_grad():
            logits, weights, ids = gate(x)
            ours = SoftmaxTopKRouter(3, renormalize)(logits)
        assert torch.equal(ours[0], weights)
        assert torch.equal(ours[1], ids)


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
    with pytest.raises(ConfigError, match=r"6 experts do not divide by 4 ranks.*1, 2, 3, 6"):
        local_experts(6, 0, 4)
    with pytest.raises(ConfigError, match="rank 2 is not one of 2 ranks"):
        local_experts(6, 2, 2)
