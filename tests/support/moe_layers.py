"""Small MoE layers with known answers, shared by the tests of `moe`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe import (
    All2All,
    ExpertMap,
    ExpertPlacement,
    FusedMoEModularKernel,
    SigmoidTopKRouter,
    SoftmaxTopKRouter,
    make_experts,
)
from ranks import run_ranks
from ubatch import CommGroup, Schedule, UBatchConfig, UBatchWrapper


@dataclass(frozen=True)
class Routed:
    """Tokens with their routing.

    Attributes:
        x: `[T, H]`.
        ids: `[T, k]` int64.
        weights: `[T, k]` float32.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Layer:
    """All experts of a layer, the same on every rank.

    Attributes:
        w13: `[E, 2I, H]`.
        w2: `[E, H, I]`.
    """

    w13: Tensor
    w2: Tensor

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w13.shape[2]

    def expected(self, routed: Routed) -> Tensor:
        """What the whole layer gives, from the plain loop over all experts."""
        reference = make_experts("reference", self.w13, self.w2)
        return reference(routed.x, routed.ids, routed.weights)

    def kernel(
        self,
        all2all: All2All[Any],
        experts: str = "grouped",
        shared_experts: nn.Module | None = None,
        placement: ExpertPlacement | None = None,
    ) -> FusedMoEModularKernel:
        """The layer as this rank of `all2all` runs it; its experts lie as in the first layer of a placement."""
        slots = all2all.experts
        if placement is None:
            held, expert_map = list(slots), None
        else:
            rank = slots.start // len(slots)
            held, expert_map = placement.held(0, rank).tolist(), ExpertMap(placement.dispatch_table(0, rank))
        local = make_experts(experts, self.w13[held], self.w2[held], slots.start, num_experts=all2all.num_experts)
        return FusedMoEModularKernel(all2all, local, shared_experts, expert_map=expert_map)


def make_layer(
    num_experts: int = 8, hidden: int = 12, intermediate: int = 5, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(num_experts, 2 * intermediate, hidden, generator=generator) / hidden**0.5
    w2 = torch.randn(num_experts, hidden, intermediate, generator=generator) / intermediate**0.5
    return Layer(w13.to(dtype), w2.to(dtype))


def make_tokens(
    layer: Layer, num_tokens: int, top_k: int = 2, seed: int = 1, only: range | None = None, unrouted: float = 0.0
) -> Routed:
    """Random tokens.

    Args:
        only: the experts that tokens may visit, all by default.
        unrouted: the share of choices that go to no expert.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, layer.hidden_size, generator=generator).to(layer.w13.dtype)
    candidates = only if only is not None else range(layer.num_experts)
    scores = torch.rand(num_tokens, len(candidates), generator=generator)
    weights, ids = torch.topk(scores, top_k)
    ids = ids + candidates.start
    ids[torch.rand(ids.shape, generator=generator) < unrouted] = -1
    return Routed(x, ids, weights / weights.sum(1, keepdim=True))


class Stack(nn.Module):
    """Residual MoE layers, routed by the first columns of their rows; and the same from the plain loop."""

    def __init__(
        self,
        layers: list[Layer],
        all2all: Any,
        experts: str = "grouped",
        top_k: int = 2,
        *,
        shared: bool = False,
        placement: ExpertPlacement | None = None,
    ) -> None:
        super().__init__()
        self.layers = layers
        torch.manual_seed(0)  # the same on all ranks
        hidden = layers[0].hidden_size
        self.shared = nn.Linear(hidden, hidden, dtype=layers[0].w13.dtype) if shared else None
        self.kernels: Any = nn.ModuleList(layer.kernel(all2all, experts, self.shared, placement) for layer in layers)
        self.router: nn.Module | SoftmaxTopKRouter = SoftmaxTopKRouter(top_k)

    def forward(self, x: Tensor) -> Tensor:
        for layer, kernel in zip(self.layers, self.kernels, strict=True):
            weights, ids = self.router(x[:, : layer.num_experts].float())
            x = x + kernel(x, weights, ids)
        return x

    def expected(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weights, ids = self.router(x[:, : layer.num_experts].float())
            y = layer.expected(Routed(x, ids, weights))
            x = x + (y if self.shared is None else y + self.shared(x))
        return x


def lanes_of(model: nn.Module, group: CommGroup | None, schedule: Schedule | str, lanes: int = 2) -> UBatchWrapper:
    """The model in lanes, however few tokens it gets."""
    config = UBatchConfig(
        verify="off",
        group=group,
        schedule=schedule,
        num_ubatches=max(lanes, 2),
        dbo_prefill_token_threshold=max(lanes, 2),
        dbo_decode_token_threshold=max(lanes, 2),
        timeout_s=20.0,
    )
    return UBatchWrapper(model, config)


Check = Callable[[int, CommGroup], None]


def run_checks(*checks: Check, ranks: int = 2) -> None:
    """Run them on gloo ranks, in inference mode."""
    run_ranks(_run, ranks, checks)


def _run(rank: int, ranks: int, checks: tuple[Check, ...]) -> None:
    group = CommGroup.from_process_group(timeout_s=20.0)
    with torch.inference_mode():
        for check in checks:
            check(rank, group)


def settings_of(router: Any) -> dict[str, Any]:
    """A router's fields as arguments of `moe.kernels.router.route_topk`."""
    settings = dict(vars(router))
    if isinstance(router, SigmoidTopKRouter):
        settings |= {"sigmoid": True, "bias": settings.pop("correction_bias")}
    return settings
