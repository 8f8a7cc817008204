"""What the tests of the DeepEP back ends share: layers of a size that DeepEP has kernels for, and lanes around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deep_ep_standin
import torch
from moe_layers import Layer, Routed, make_layer, make_tokens
from torch import Tensor, nn

from moe import (
    All2All,
    FusedMoEModularKernel,
    SoftmaxTopKRouter,
    dequantize_blocks,
    make_all2all,
    quantize_blocks,
)
from ranks import run_ranks
from ubatch import CommGroup, Schedule, UBatchConfig, UBatchWrapper

EXPERTS, HIDDEN, TOP_K, ROOM = 8, 2048, 2, 16

BACKENDS: dict[str, dict[str, Any]] = {
    "deepep_high_throughput": {},
    "deepep_low_latency": {"max_tokens_per_rank": ROOM},
    "deepep_v2": {"max_tokens_per_rank": ROOM},
}
TOLERANCE = 1.5e-2
"""Of a token's row in bfloat16, relative."""

Check = Callable[[int, CommGroup], None]


def run_checks(*checks: Check, ranks: int = 2) -> None:
    """Run them on gloo ranks, with the stand-in in DeepEP's place."""
    run_ranks(_run, ranks, checks)


def _run(rank: int, ranks: int, checks: tuple[Check, ...]) -> None:
    with torch.inference_mode():
        for check in checks:
            with deep_ep_standin.installed():
                check(rank, CommGroup.from_process_group(timeout_s=20.0))


def layer_of(seed: int = 0) -> Layer:
    return make_layer(EXPERTS, HIDDEN, intermediate=4, seed=seed, dtype=torch.bfloat16)


def transport(name: str, group: CommGroup, **options: Any) -> All2All[Any]:
    return make_all2all(name, group=group, num_experts=EXPERTS, **{**BACKENDS.get(name, {}), **options})


def tokens_of(layer: Layer, tokens: int, **options: Any) -> Routed:
    return make_tokens(layer, tokens, TOP_K, **options)


def check_layer(kernel: FusedMoEModularKernel, layer: Layer, routed: Routed, what: str, use_fp8: bool = False) -> None:
    """The layer's output is the plain loop's in float32, over what arrives of the tokens."""
    x = dequantize_blocks(*quantize_blocks(routed.x), torch.float32) if use_fp8 else routed.x.float()
    expected = Layer(layer.w13.float(), layer.w2.float()).expected(Routed(x, routed.ids, routed.weights))
    close(kernel(routed.x, routed.weights, routed.ids), expected, what)


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.dtype is torch.bfloat16, what
    assert actual.shape == expected.shape, what
    difference, size = (actual.float() - expected.float()).norm(dim=1), expected.float().norm(dim=1)
    error = difference / size.clamp(min=1e-3)  # a token routed nowhere is zero
    assert (error < TOLERANCE).all(), f"{what}: tokens are wrong by {error.tolist()}"


class Stack(nn.Module):
    """Residual MoE layers with routers of their own, in bfloat16."""

    def __init__(self, layers: list[Layer], all2all: Any, experts: str = "grouped") -> None:
        super().__init__()
        self.layers = layers
        self.kernels = nn.ModuleList(layer.kernel(all2all, experts) for layer in layers)
        self.router: nn.Module = SoftmaxTopKRouter(TOP_K)

    def forward(self, x: Tensor) -> Tensor:
        for kernel in self.kernels:
            weights, ids = self.router(x[:, :EXPERTS].float())
            x = x + kernel(x, weights, ids)
        return x

    def expected(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weights, ids = self.router(x[:, :EXPERTS].float())
            x = x + layer.expected(Routed(x, ids, weights))
        return x


def lanes_of(model: nn.Module, group: CommGroup, schedule: Schedule | str, lanes: int = 2) -> UBatchWrapper:
    return UBatchWrapper(
        model,
        UBatchConfig(
            verify="off",
            group=group,
            schedule=schedule,
            num_ubatches=lanes,
            dbo_prefill_token_threshold=lanes,
            dbo_decode_token_threshold=lanes,
            timeout_s=20.0,
        ),
    )


def rows_of(tokens: int, seed: int) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
