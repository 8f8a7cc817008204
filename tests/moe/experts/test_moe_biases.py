"""Experts with biases and a clamped activation, as gpt-oss has them: the formula, in all layouts, and who refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_layers import make_layer, make_tokens

from moe import ClampedSwiGLU, ExpertsNeeds, ExpertsShape, make_experts
from moe.experts import fastest
from moe.experts.grouped import GroupedExperts
from ubatch import ConfigError

LAYER = make_layer()
CLAMPED = ClampedSwiGLU(limit=0.4, alpha=1.5)


def biased(name: str, held: range = range(8)) -> Any:
    generator = torch.Generator().manual_seed(3)
    b13 = torch.randn(LAYER.w13.shape[:2], generator=generator)
    b2 = torch.randn(LAYER.w2.shape[:2], generator=generator)
    parts = (each[held.start : held.stop] for each in (LAYER.w13, LAYER.w2, b13, b2))
    w13, w2, b13, b2 = parts
    return make_experts(name, w13, w2, held.start, b13=b13, b2=b2, activation=CLAMPED)


def test_the_plain_loop_is_the_formula() -> None:
    experts, x = biased("reference"), torch.randn(12)
    gate, up = (experts.w13[2] @ x + experts.b13[2]).chunk(2)
    gate, up = gate.clamp(max=0.4), up.clamp(-0.4, 0.4)
    y = experts.w2[2] @ ((up + 1) * gate / (1 + torch.exp(-1.5 * gate))) + experts.b2[2]
    weights = torch.tensor([[0.3]])
    torch.testing.assert_close(experts(x[None], torch.tensor([[2]]), weights)[0], 0.3 * y)


@pytest.mark.parametrize("held", [range(8), range(3, 7)], ids=["all", "some"])
def test_grouped_equals_the_plain_loop(held: range) -> None:
    routed = make_tokens(LAYER, 30, top_k=3)
    grouped, reference = biased("grouped", held), biased("reference", held)
    inputs = (routed.x, routed.ids, routed.weights)
    expected = reference(*inputs)
    torch.testing.assert_close(grouped(*inputs), expected)
    halves = [range(2), range(2, len(held))]
    assert torch.cat(list(grouped.run_blocks(*inputs, halves))).abs().sum() > 0
    counts = torch.tensor([index % 3 for index in range(len(held))], dtype=torch.int32)
    rows = torch.randn(len(held), 4, 12)
    one, other = grouped.run_batched(rows, counts), reference.run_batched(rows, counts)
    for slot, count in enumerate(counts.tolist()):
        torch.testing.assert_close(one[slot, :count], other[slot, :count])


@pytest.mark.parametrize("name", ["grouped_mm", "native", "packed"])
def test_other_back_ends_refuse_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name!r} has no biases and no clamped activation.*Choose 'grouped'"):
        biased(name)


def test_auto_finds_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    needs, shape, cpu = ExpertsNeeds(biases=True), ExpertsShape(8, 8, 2, 16, 8), torch.device("cpu")
    assert fastest.usable_experts(shape, torch.float32, cpu, needs) == {"grouped": None}
    monkeypatch.setattr(fastest, "measured", lambda device: True)  # as on a GPU
    monkeypatch.setattr(fastest, "_CANDIDATES", ("grouped_mm",))  # the others import Triton
    usable = fastest.usable_experts(shape, torch.float32, cpu, needs)
    assert "has no biases" in str(usable["grouped_mm"])
    assert usable["grouped"] is None


def test_biases_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"b13 must be \[8, 10\]"):
        GroupedExperts(LAYER.w13, LAYER.w2, b13=torch.zeros(8, 5))
    with pytest.raises(ConfigError, match=r"b2 must be \[8, 12\] torch.float32"):
        GroupedExperts(LAYER.w13, LAYER.w2, b2=torch.zeros(8, 12, dtype=torch.float64))
