"""Routers: from a token's logits to the experts it visits and their weights.

logits [T, E] -> softmax -> top-k -> (renormalise) -> topk_weights [T, k], topk_ids [T, k]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ubatch import ConfigError

__all__ = ["NO_EXPERT", "Router", "SoftmaxTopKRouter", "mask_padding"]

NO_EXPERT = -1
"""In `topk_ids`: this choice goes to no expert, travels nowhere and adds nothing."""


class Router(Protocol):
    """Chooses experts. Routers keep no state between calls: several lanes share one."""

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Route every token.

        Args:
            router_logits: `[T, E]`, any floating dtype.

        Returns:
            `topk_weights [T, k]` float32 and `topk_ids [T, k]` int64 (global expert ids).
        """


@dataclass(frozen=True)
class SoftmaxTopKRouter:
    """Softmax over all experts in float32, then the k largest.

    Attributes:
        top_k: experts per token.
        renormalize: scale the k weights to sum to 1 (Mixtral always; Qwen3-MoE where `norm_topk_prob` is set).

    Source: Mixtral of Experts (Jiang et al., 2024), section 2.1; the Qwen3-MoE and Mixtral models of transformers.
    """

    top_k: int
    renormalize: bool = True

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, not {self.top_k}.")

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Router`.

        Raises:
            ConfigError: the logits are not `[T, E]`, or there are fewer experts than `top_k`.
        """
        if router_logits.dim() != 2 or not router_logits.is_floating_point():
            raise ConfigError(
                f"router_logits must be floating [tokens, experts], not {router_logits.dtype} "
                f"{list(router_logits.shape)}."
            )
        if self.top_k > router_logits.shape[1]:
            raise ConfigError(f"top_k = {self.top_k} is more than the {router_logits.shape[1]} experts there are.")
        probabilities = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
        topk_weights, topk_ids = torch.topk(probabilities, self.top_k, dim=-1)
        if self.renormalize:
            topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        return topk_weights, topk_ids


def mask_padding(topk_ids: Tensor, num_tokens: int) -> Tensor:
    """Route the rows from `num_tokens` on, which are padding, to no expert.

    Args:
        topk_ids: `[T, k]`.
        num_tokens: how many rows are tokens; `ForwardContext.num_tokens` of a padded step.

    Returns:
        `topk_ids` itself where nothing is padded, else a new tensor.

    Raises:
        ConfigError: `num_tokens` is negative or more than there are rows.
    """
    rows = topk_ids.shape[0]
    if not 0 <= num_tokens <= rows:
        raise ConfigError(f"num_tokens = {num_tokens} must be between 0 and the {rows} rows of topk_ids.")
    if num_tokens == rows:
        return topk_ids
    masked = topk_ids.clone()
    masked[num_tokens:] = NO_EXPERT
    return masked
