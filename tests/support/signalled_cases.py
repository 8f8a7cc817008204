"""A model whose combines are signalled, and the schedules that it runs under."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from moe_layers import make_layer
from torch import Tensor, nn

from moe import NO_EXPERT, FusedMoEModularKernel, SoftmaxTopKRouter, make_all2all, make_experts
from ubatch import CUDAGraphMode, Schedule, UBatchConfig, UBatchWrapper, get_schedule

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, LAYERS = 4, 32, 20, 2, 2
ONE, TWO = get_schedule("single_batch_signalled"), replace(get_schedule("mlp_shared_overlap"), signalled=True)
SPLIT: dict[str, Any] = {"split_dims": {"x": 0, "is_token": 0}}
SCHEDULES = [
    ONE,
    replace(ONE, name="one by two", chunks=2),
    replace(ONE, name="one by three of combine", chunks=3, chunk_dispatch=False),
    replace(TWO, name="two", comm_sms=16),
    replace(TWO, name="two by two", comm_sms=16, chunks=2),
]


class Model(nn.Module):
    """Residual layers with a shared expert; one transport serves all."""

    def __init__(
        self,
        all2all: str = "host_loopback_batched",
        experts: str = "triton_batched",
        sizes: tuple[int, int, int] = (EXPERTS, HIDDEN, INTERMEDIATE),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all2all: Any = make_all2all(all2all, group=None, num_experts=sizes[0])
        self.shared = nn.Linear(sizes[1], sizes[1], dtype=dtype, device=device)
        layers = [make_layer(*sizes, seed=seed, dtype=dtype) for seed in range(LAYERS)]
        held = [make_experts(experts, layer.w13.to(device), layer.w2.to(device)) for layer in layers]
        self.kernels = nn.ModuleList(FusedMoEModularKernel(self.all2all, each, self.shared) for each in held)
        self.router = SoftmaxTopKRouter(TOP_K)

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        """`x [T, H]`; `is_token [T, 1]` bool, False for padding, which goes to no expert."""
        # Routed by the input alone: other tiles round a layer differently, and a near tie is then another expert.
        logits = x.float().split(self.all2all.num_experts, dim=1)
        for layer, kernel in enumerate(self.kernels):
            weights, ids = self.router(logits[layer])
            x = x + kernel(x, weights, ids.masked_fill(~is_token, NO_EXPERT))
        return x


@contextmanager
def overlapped(
    model: nn.Module, schedule: Schedule, mode: CUDAGraphMode = CUDAGraphMode.NONE
) -> Iterator[UBatchWrapper]:
    config = UBatchConfig(
        verify="off",
        **SPLIT,
        schedule=schedule,
        dbo_prefill_token_threshold=2,
        dbo_decode_token_threshold=2,
        require_overlap=True,
    )
    wrapper = UBatchWrapper(model, config, mode)
    try:
        with torch.inference_mode():
            yield wrapper
    finally:
        wrapper.close()


def inputs(tokens: int = 90, padded: int = 3, hidden: int = HIDDEN) -> tuple[Tensor, Tensor]:
    """Tokens, most of which choose the same expert: one with more rows than a block has, others with few or none."""
    x = torch.randn(tokens, hidden)
    x[:, 1] += 2.0
    return x, tokens_of(tokens, padded)


def tokens_of(rows: int, padded: int) -> Tensor:
    return torch.arange(rows)[:, None] < rows - padded


def plain(*given: Tensor) -> Tensor:
    """What the reference gives, over a transport with which nothing travels."""
    with torch.inference_mode():
        output: Tensor = Model("local", "reference")(*given)
    return output
