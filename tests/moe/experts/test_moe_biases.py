"""Experts with biases and a clamped activation, as gpt-oss has them: the formula, and who serves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_layers import make_layer

from moe import ClampedSwiGLU, ExpertsNeeds, ExpertsShape, make_experts
from moe.experts import registry
from moe.experts.torch_experts import GroupedExperts
from ubatch import ConfigError

LAYER = make_layer()


def test_the_plain_loop_is_the_formula() -> None:
    x, b13, b2 = torch.randn(12), torch.randn(LAYER.w13.shape[:2]), torch.randn(LAYER.w2.shape[:2])
    clamped = ClampedSwiGLU(limit=0.4, alpha=1.5)
    experts: Any = make_experts("reference", LAYER.w13, LAYER.w2, b13=b13, b2=b2, activation=clamped)
    gate, up = (experts.w13[2] @ x + experts.b13[2]).chunk(2)
    gate, up = gate.clamp(max=0.4), up.clamp(-0.4, 0.4)
    y = experts.w2[2] @ ((up + 1) * gate / (1 + torch.exp(-1.5 * gate))) + experts.b2[2]
    weights = torch.tensor([[0.3]])
    torch.testing.assert_close(experts(x[None], torch.tensor([[2]]), weights)[0], 0.3 * y)


def test_auto_finds_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    needs, shape, cpu = ExpertsNeeds(biases=True), ExpertsShape(8, 8, 2, 16, 8), torch.device("cpu")
    assert registry.usable_experts(shape, torch.float32, cpu, needs) == {"grouped": None}
    monkeypatch.setattr(registry, "measured", lambda device: True)  # as on a GPU
    monkeypatch.setattr(registry, "_CANDIDATES", ("grouped_mm",))  # the others import Triton
    usable = registry.usable_experts(shape, torch.float32, cpu, needs)
    assert "has no biases" in str(usable["grouped_mm"])
    assert usable["grouped"] is None


def test_biases_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"b13 must be \[8, 10\]"):
        GroupedExperts(LAYER.w13, LAYER.w2, b13=torch.zeros(8, 5))
    with pytest.raises(ConfigError, match=r"b2 must be \[8, 12\] torch.float32"):
        GroupedExperts(LAYER.w13, LAYER.w2, b2=torch.zeros(8, 12, dtype=torch.float64))
