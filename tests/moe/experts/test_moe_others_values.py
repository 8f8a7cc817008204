"""A token whose numbers are nan or infinite, and whatever fills padding, changes no other token's output by a bit."""

from __future__ import annotations

import pytest
import torch
from moe_layers import make_layer, make_tokens, settings_of
from torch import Tensor
from triton_batches import DEVICE

from moe import GroupLimitedRouter, Router, SigmoidTopKRouter, SoftmaxTopKRouter, make_all2all
from moe.kernels.router import route_topk
from ubatch.kernels.c_jit import why_not_c

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


@pytest.mark.parametrize(
    ("transport", "experts"),
    [
        ("local", "grouped"),
        ("local", "grouped_mm"),
        ("local", "native"),
        ("local", "packed"),
        ("local", "triton"),
        ("host_loopback", "grouped"),
        ("host_loopback_batched", "grouped"),
        ("host_loopback_batched", "triton_batched"),
    ],
)
def test_a_layer_keeps_tokens_apart(transport: str, experts: str) -> None:
    if experts == "native" and why_not_c():
        pytest.skip("needs a C compiler")
    layer = make_layer(hidden=16, intermediate=8)
    routed = make_tokens(layer, 9, unrouted=0.2)
    kernel = layer.kernel(make_all2all(transport, group=None, num_experts=8), experts)
    bad, padding = [1, 4, 7], [8]
    ids = routed.ids.clone()
    ids[padding] = -1
    x, weights = routed.x.clone(), routed.weights.clone()
    x[bad], weights[bad] = BAD[:, None], BAD[:, None]
    x[padding], weights[padding] = float("nan"), float("nan")
    with torch.inference_mode():
        clean, found = kernel(routed.x, routed.weights, ids), kernel(x, weights, ids)
    others = [0, 2, 3, 5, 6]
    assert torch.equal(found[others], clean[others])
    assert torch.equal(found[padding], torch.zeros_like(found[padding]))
