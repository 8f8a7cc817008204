"""A token whose numbers are nan or infinite, and whatever fills padding, changes no other token's output by a bit."""

from __future__ import annotations

import pytest
import torch
from moe_layers import settings_of
from torch import Tensor
from triton_batches import DEVICE

from moe import GroupLimitedRouter, Router, SigmoidTopKRouter, SoftmaxTopKRouter
from moe.kernels.router import route_topk

ROUTERS: list[Router] = [
    SoftmaxTopKRouter(2),
    GroupLimitedRouter(2, 4, 2, renormalize=True),
    SigmoidTopKRouter(2, 4, 2, correction_bias=torch.linspace(0, 1, 8)),
]
# numpy's warnings, in Triton's interpreter
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.long]

BAD = torch.tensor([float("nan"), float("inf"), float("-inf")])


@pytest.mark.sample(3)
@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: type(router).__name__)
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "kernel"])
def test_a_token_without_numbers_chooses_different_experts_that_exist(router: Router, fused: bool) -> None:
    """Transports have room for each token once per expert."""
    logits = torch.randn(9, 8)
    clean = logits.clone()
    logits[[1, 4, 7]] = BAD[:, None]
    logits[8, 3] = float("nan")

    def chosen(x: Tensor) -> tuple[Tensor, Tensor]:
        if not fused:
            return router(x)
        settings = settings_of(router)
        bias = settings.get("bias")
        if bias is not None:
            settings["bias"] = bias.to(DEVICE)
        weights, ids = route_topk(x.to(DEVICE), **settings)
        return weights.cpu(), ids.cpu()

    (weights, ids), (clean_weights, clean_ids) = chosen(logits), chosen(clean)
    assert ids.min() >= 0
    assert ids.max() < 8
    assert (ids[:, 0] != ids[:, 1]).all()
    others = [0, 2, 3, 5, 6]
    assert torch.equal(ids[others], clean_ids[others])
    assert torch.equal(weights[others], clean_weights[others])
