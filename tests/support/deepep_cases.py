"""What the tests of the DeepEP back ends share: layers of a size that DeepEP has kernels for, and lanes around them."""

from functools import partial
from typing import Any

import deep_ep_standin
import moe_layers
import torch
from moe_layers import Check, Layer, Routed, Stack, lanes_of, make_layer, make_tokens
from torch import Tensor

from moe import All2All, FusedMoEModularKernel, dequantize_blocks, make_all2all, quantize_blocks
from ubatch import CommGroup

__all__ = ["Stack", "lanes_of"]

EXPERTS, HIDDEN, TOP_K, ROOM = 8, 2048, 2, 16

BACKENDS: dict[str, dict[str, Any]] = {
    "deepep_high_throughput": {},
    "deepep_low_latency": {"max_tokens_per_rank": ROOM},
    "deepep_v2": {"max_tokens_per_rank": ROOM},
}
TOLERANCE = 1.5e-2
"""Of a token's row in bfloat16, relative."""


def run_checks(*checks: Check, ranks: int = 2) -> None:
    """Run them on gloo ranks, with the stand-in in DeepEP's place, which each finds new."""
    moe_layers.run_checks(*(partial(_run, check) for check in checks), ranks=ranks)


def _run(check: Check, rank: int, group: CommGroup) -> None:
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


def rows_of(tokens: int, seed: int) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
