"""Routers: from a token's logits to the experts it visits and their weights.

    SoftmaxTopKRouter   softmax -> top-k -> (renormalise)                                Mixtral, Qwen3-MoE, OLMoE
    GroupLimitedRouter  softmax -> best groups -> top-k -> (renormalise) -> scale        DeepSeek-V2
    SigmoidTopKRouter   sigmoid + bias -> best groups -> top-k; weights without the bias -> (renormalise) -> scale
                                                                                         DeepSeek-V3

All take logits `[T, E]` and give `topk_weights [T, k]` and `topk_ids [T, k]`. Groups are blocks of `E / num_groups`
neighbouring experts: a token may visit those of its `top_groups` best groups only, and so few ranks.

The torch code here runs on every device and is the reference. On a GPU that Triton supports (`moe.kernels.router`), and
on a CPU with a C compiler (`route_in_c`, of `moe/kernels/route.c`), each router is one kernel instead, unless gradients
are needed. Experts with equal scores are in any order here, and in the order of their ids in the kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moe.experts.quantization import in_triton
from ubatch import ConfigError
from ubatch.kernels import compile_c, kernel_of, rows_contiguous, runs_in_c

MOST_EXPERTS = 4096
"""More do not fit on the kernel's stack."""


def route_in_c(
    logits: Tensor,
    top_k: int,
    *,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
    num_tokens: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose every token's experts; arguments and results as `moe.kernels.router.route_topk`.

    Args:
        logits: `[T, E]` float32 or bfloat16, E up to `MOST_EXPERTS`.
    """
    rows, experts = logits.shape
    logits = logits if logits.stride(1) == 1 else rows_contiguous(logits)
    if bias is not None:
        bias = bias.float().contiguous()
    weights = torch.empty(rows, top_k, dtype=torch.float32, device="cpu")
    ids = torch.empty(rows, top_k, dtype=torch.int64, device="cpu")
    _kernel(logits.dtype)(
        *(logits.data_ptr(), logits.stride(0), rows, rows if num_tokens is None else int(num_tokens), experts),
        *(top_k, num_groups, top_groups, 2 if sigmoid and experts > num_groups else 1),
        *(sigmoid, renormalize, scale, None if bias is None else bias.data_ptr()),
        *(weights.data_ptr(), ids.data_ptr()),
        torch.get_num_threads(),
    )
    return weights, ids


@cache
def _kernel(dtype: torch.dtype, **defines: int) -> Callable[..., None]:
    source = (Path(__file__).parent / "kernels" / "route.c").read_text(encoding="utf-8")
    library = compile_c(source, BFLOAT16=int(dtype is torch.bfloat16), **defines)
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    settings = (*[number] * 8, flag, flag, ctypes.c_float)
    return kernel_of(library, "route", pointer, *settings, pointer, pointer, pointer, flag)


NO_EXPERT = -1
"""In `topk_ids`: this choice goes to no expert, is not sent and adds nothing."""

_TINY = 1e-20
"""Added to a sum of weights before dividing by it, as DeepSeek does: all of them may underflow."""


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
        renormalize: scale the k weights to sum to 1 (Mixtral always, Qwen3-MoE and OLMoE if `norm_topk_prob` is set).

    Source: Mixtral of Experts (Jiang et al., 2024), section 2.1; transformers' Mixtral, Qwen3-MoE and OLMoE.
    """

    top_k: int
    renormalize: bool = True

    def __post_init__(self) -> None:
        _check_settings(self.top_k)

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Router`.

        Raises:
            ConfigError: the logits are not `[T, E]`, or there are fewer experts than `top_k`.
        """
        self._check(router_logits)
        if _fuses(router_logits):
            return _fused(self, router_logits)
        probabilities = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
        topk_weights, topk_ids = torch.topk(probabilities, self.top_k, dim=-1)
        if self.renormalize:
            topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        return topk_weights, topk_ids

    def _check(self, router_logits: Tensor) -> None:
        """Refuse logits that this router cannot take; see `__call__`."""
        _check_logits(router_logits, self.top_k)


@dataclass(frozen=True)
class GroupLimitedRouter:
    """Softmax over all experts in float32, then the k largest in the groups with the best expert.

    Attributes:
        top_k: experts per token.
        num_groups: blocks that the experts are cut into; 1 does not limit.
        top_groups: groups that a token may visit.
        renormalize: scale the k weights to sum to 1, before `scale`.
        scale: factor on the weights (`routed_scaling_factor`).

    Source: DeepSeek-V2 (2024), section 2.2.2 (device-limited routing); `DeepseekV2TopkRouter` of transformers, whose
    `greedy` method is `num_groups = 1`.
    """

    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_settings(self.top_k, self.num_groups, self.top_groups, self.scale)

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Router`.

        Raises:
            ConfigError: the logits are not `[T, E]`, or `E` experts do not fit `top_k` and the groups.
        """
        self._check(router_logits)
        if _fuses(router_logits):
            return _fused(self, router_logits)
        scores = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
        return _best_in_groups(self, scores, scores, best=1)

    def _check(self, router_logits: Tensor) -> None:
        """Refuse logits that this router cannot take; see `__call__`."""
        _check_logits(router_logits, self.top_k, self.num_groups, self.top_groups)


@dataclass(frozen=True)
class SigmoidTopKRouter:
    """Sigmoid of every logit in float32; a bias that balances the experts' load affects the choice, not the weights.

    The k experts with the largest `score + bias` in the best groups are chosen; a group's score is the sum of its two
    best experts. The weights are the scores without the bias.

    Attributes:
        top_k: experts per token.
        num_groups: blocks that the experts are cut into; 1 does not limit.
        top_groups: groups that a token may visit.
        renormalize: scale the k weights to sum to 1, before `scale`.
        scale: factor on the weights (`routed_scaling_factor`).
        correction_bias: `[E]` float32 (`e_score_correction_bias`); None is zeros. Ignored when routers are compared.

    Source: DeepSeek-V3 (2024), section 2.1.2; `DeepseekV3TopkRouter` of transformers.
    """

    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    correction_bias: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_settings(self.top_k, self.num_groups, self.top_groups, self.scale)

    def __call__(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Router`.

        Raises:
            ConfigError: the logits are not `[T, E]`, or `E` experts do not fit `top_k`, the groups or the bias.
        """
        self._check(router_logits)
        if _fuses(router_logits):
            return _fused(self, router_logits)
        scores = torch.sigmoid(router_logits.float())
        candidates = scores if self.correction_bias is None else scores + self.correction_bias
        return _best_in_groups(self, scores, candidates, best=2)

    def _check(self, router_logits: Tensor) -> None:
        """Refuse logits that this router cannot take; see `__call__`."""
        _check_logits(router_logits, self.top_k, self.num_groups, self.top_groups)
        bias = self.correction_bias
        if bias is not None and bias.shape != router_logits.shape[1:]:
            raise ConfigError(f"correction_bias is {list(bias.shape)}, but there are {router_logits.shape[1]} experts.")


def _best_in_groups(
    router: GroupLimitedRouter | SigmoidTopKRouter, scores: Tensor, candidates: Tensor, *, best: int
) -> tuple[Tensor, Tensor]:
    """The k largest `candidates` `[T, E]` of the groups whose `best` best ones sum to most; weights from `scores`."""
    if router.num_groups > router.top_groups:
        groups = candidates.unflatten(-1, (router.num_groups, -1))
        group_scores = torch.topk(groups, min(best, groups.shape[-1]), dim=-1).values.sum(dim=-1)
        kept = torch.topk(group_scores, router.top_groups, dim=-1).indices
        outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
        candidates = groups.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
    topk_ids = torch.topk(candidates, router.top_k, dim=-1).indices
    weights = scores.gather(1, topk_ids)
    if router.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
    return weights * router.scale, topk_ids


def _check_settings(top_k: int, num_groups: int = 1, top_groups: int = 1, scale: float = 1.0) -> None:
    if top_k < 1:
        raise ConfigError(f"top_k must be at least 1, not {top_k}.")
    if not 1 <= top_groups <= num_groups:
        raise ConfigError(f"top_groups = {top_groups} must be between 1 and the {num_groups} groups there are.")
    if not scale > 0:
        raise ConfigError(f"scale must be positive, not {scale}.")


def _check_logits(router_logits: Tensor, top_k: int, num_groups: int = 1, top_groups: int = 1) -> None:
    if router_logits.dim() != 2 or not router_logits.is_floating_point():
        raise ConfigError(
            f"router_logits must be floating [tokens, experts], not {router_logits.dtype} {list(router_logits.shape)}."
        )
    num_experts = router_logits.shape[1]
    if top_k > num_experts:
        raise ConfigError(f"top_k = {top_k} is more than the {num_experts} experts there are.")
    if num_experts % num_groups:
        raise ConfigError(f"{num_experts} experts cannot be cut into {num_groups} groups of equal size.")
    allowed = num_experts // num_groups * top_groups
    if top_k > allowed:
        raise ConfigError(
            f"top_k = {top_k} is more than the {allowed} experts in the {top_groups} of {num_groups} groups that a "
            "token may visit."
        )


def route(router: Router, router_logits: Tensor, num_tokens: int | Tensor) -> tuple[Tensor, Tensor]:
    """Route every token, and padding to no expert: `router`, then `mask_padding`, in one kernel if there is one.

    Args:
        router: any.
        router_logits: `[T, E]`, floating.
        num_tokens: see `mask_padding`.

    Returns:
        See `Router`; the ids of padding are -1.

    Raises:
        ConfigError: what `router` and `mask_padding` refuse.
    """
    if isinstance(router, SoftmaxTopKRouter | GroupLimitedRouter | SigmoidTopKRouter) and _fuses(router_logits):
        router._check(router_logits)
        if isinstance(num_tokens, int) and num_tokens == router_logits.shape[0]:
            return _fused(router, router_logits)
        padded = _check_num_tokens(num_tokens, router_logits.shape[0])
        return _fused(router, router_logits, num_tokens if padded else None)
    topk_weights, topk_ids = router(router_logits)
    return topk_weights, mask_padding(topk_ids, num_tokens)


def mask_padding(topk_ids: Tensor, num_tokens: int | Tensor) -> Tensor:
    """Route the rows from `num_tokens` on, which are padding, to no expert.

    Args:
        topk_ids: `[T, k]`.
        num_tokens: how many rows are tokens; `ForwardContext.num_tokens` of a padded step. In a graph, whose padding
            differs between replays, one integer in a tensor on the device of the ids: it is not read on the host.

    Returns:
        `topk_ids` itself if nothing is padded, else a new tensor.

    Raises:
        ConfigError: `num_tokens` is negative or more than there are rows, or a tensor of more than one integer.
    """
    rows = topk_ids.shape[0]
    if not _check_num_tokens(num_tokens, rows):
        return topk_ids
    if isinstance(num_tokens, Tensor):
        is_padding = torch.arange(rows, device=topk_ids.device) >= num_tokens
        return topk_ids.masked_fill(is_padding[:, None], NO_EXPERT)
    masked = topk_ids.clone()
    masked[num_tokens:] = NO_EXPERT
    return masked


def _check_num_tokens(num_tokens: int | Tensor, rows: int) -> bool:
    """Whether there may be padding."""
    if isinstance(num_tokens, Tensor):
        if num_tokens.numel() != 1 or num_tokens.dtype not in (torch.int32, torch.int64):
            raise ConfigError(
                f"num_tokens must be one int32 or int64, not {num_tokens.dtype} {list(num_tokens.shape)}."
            )
        return True
    if not 0 <= num_tokens <= rows:
        raise ConfigError(f"num_tokens = {num_tokens} must be between 0 and the {rows} rows of topk_ids.")
    return num_tokens < rows


def _fuses(router_logits: Tensor) -> bool:
    """Whether a kernel takes these logits."""
    if not router_logits.is_cuda:
        return runs_in_c(router_logits) and router_logits.shape[1] <= MOST_EXPERTS
    return in_triton("cuda") and not (router_logits.requires_grad and torch.is_grad_enabled())


def _fused(
    router: SoftmaxTopKRouter | GroupLimitedRouter | SigmoidTopKRouter,
    router_logits: Tensor,
    num_tokens: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    settings: dict[str, Any] = vars(router)
    if isinstance(router, SigmoidTopKRouter):
        settings = {**settings, "sigmoid": True, "bias": router.correction_bias}
        del settings["correction_bias"]
    if not router_logits.is_cuda:
        return route_in_c(router_logits, **settings, num_tokens=num_tokens)
    from moe.kernels.router import route_topk

    return route_topk(router_logits, **settings, num_tokens=num_tokens)
