"""Routing in one kernel: scores, the best groups, the best experts, their weights, and no expert for padding.

    scores      softmax or sigmoid of a token's logits, in float32; a bias affects the choice, but not the weights
    groups      the best `top_groups` groups: by their best expert, or by the sum of their two best
    experts     the k best experts of those groups, one after the other
    weights     scores without the bias, renormalised, scaled

The torch reference is in `moe.router`. It does not define which of two experts with equal scores is first; here it is
always the one with the lower id. A tile's rows are tokens, its columns experts, group by group:

    column c    group c // BLOCK_S, its expert c % BLOCK_S; both sides padded to powers of two

A score and its column make one 64-bit key. Keys are ordered by score, then by column from the last to the first. So the
maximum is unique, and a nan cannot select an expert that does not exist.

Source: the routers of Mixtral, DeepSeek-V2 and DeepSeek-V3; see `moe.router`.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import cdiv, constant, jit, power_of_2

_TINY = constant(1e-20)  # as in `moe.router`
_LOWEST = constant(-(2**63))
_MAX_TILE = 1024  # scores that one program holds, if it has more than one token


@jit()
def _keys(scores: tl.tensor, columns: tl.tensor, BLOCK: tl.constexpr) -> Any:
    """Keys in the order of the scores; keys of equal scores are ordered from the last column to the first."""
    bits = tl.where(scores == scores, scores.to(tl.int32, bitcast=True), 0x7FC00000)  # nan is the largest, as in torch
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (BLOCK - 1 - columns).to(tl.int64)


@jit()
def _column(key: tl.tensor, BLOCK: tl.constexpr) -> Any:
    """The column of a key."""
    return BLOCK - 1 - (key & 0xFFFFFFFF).to(tl.int32)


@jit()
def _group_scores(candidates: tl.tensor, BY_TWO: tl.constexpr, BLOCK_S: tl.constexpr) -> Any:
    """Group scores `[tokens, groups]` of candidates `[tokens, groups, BLOCK_S]`."""
    best = tl.max(candidates, 2)
    if not BY_TWO:
        return best
    places = tl.arange(0, BLOCK_S)[None, None, :]
    first = tl.max(_keys(candidates, places, BLOCK_S), 2)
    others = tl.where(places == _column(first, BLOCK_S)[:, :, None], float("-inf"), candidates)
    return best + tl.max(others, 2)


@jit("num_tokens", "num_real")
def _topk_kernel(
    weights: tl.tensor,
    ids: tl.tensor,
    logits: tl.tensor,
    logits_stride: tl.tensor,
    bias: tl.tensor,
    num_tokens: tl.tensor,
    num_real: tl.tensor,
    scale: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_TWO: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    REAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    BLOCK: tl.constexpr = BLOCK_G * BLOCK_S
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK)
    group, place = columns // BLOCK_S, columns % BLOCK_S
    expert = group * GROUP_SIZE + place
    is_token = token < num_tokens
    is_expert = (group < GROUPS) & (place < GROUP_SIZE)
    inside = is_token[:, None] & is_expert[None, :]
    row = token.to(tl.int64)[:, None] * logits_stride
    x = tl.load(logits + row + expert[None, :], mask=inside, other=0).to(tl.float32)
    if SIGMOID:
        small = tl.exp(-tl.abs(x))  # never overflows
        scores = tl.where(x < 0, small, 1.0) / (1.0 + small)
    else:
        x = tl.where(is_expert[None, :], x, float("-inf"))
        powers = tl.exp(x - tl.max(x, 1)[:, None])
        scores = powers / tl.sum(powers, 1)[:, None]

    candidates = scores
    if HAS_BIAS:
        candidates = scores + tl.load(bias + expert, mask=is_expert, other=0).to(tl.float32)[None, :]
    candidates = tl.where(is_expert[None, :], candidates, float("-inf"))
    keys = _keys(candidates, columns[None, :], BLOCK)
    keys = tl.where(is_expert[None, :], keys, _LOWEST)  # below every expert, also one with score -inf
    if TOP_GROUPS < GROUPS:
        groups = tl.arange(0, BLOCK_G)
        of_groups = _group_scores(tl.reshape(candidates, [BLOCK_T, BLOCK_G, BLOCK_S]), BY_TWO, BLOCK_S)
        group_keys = tl.where((groups < GROUPS)[None, :], _keys(of_groups, groups[None, :], BLOCK_G), _LOWEST)
        allowed = tl.zeros([BLOCK_T, BLOCK_G], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(group_keys, 1)
            is_best = group_keys == best[:, None]
            allowed = tl.where(is_best, 1, allowed)
            group_keys = tl.where(is_best, _LOWEST, group_keys)
        spread = tl.broadcast_to(allowed[:, :, None], [BLOCK_T, BLOCK_G, BLOCK_S])
        keys = tl.where(tl.reshape(spread, [BLOCK_T, BLOCK]) != 0, keys, _LOWEST)

    choices = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for choice in tl.static_range(TOP_K):
        best = tl.max(keys, 1)
        is_best = keys == best[:, None]
        column = _column(best, BLOCK)
        score = tl.sum(tl.where(is_best, scores, 0.0), 1)
        its_id = column // BLOCK_S * GROUP_SIZE + column % BLOCK_S
        chosen = tl.where(choices == choice, its_id[:, None], chosen)
        weight = tl.where(choices == choice, score[:, None], weight)
        keys = tl.where(is_best, _LOWEST, keys)

    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 1) + _TINY)[:, None]
    if REAL == 1:
        chosen = tl.where((token < num_real)[:, None], chosen, -1)
    elif REAL == 2:
        chosen = tl.where((token < tl.load(num_real))[:, None], chosen, -1)
    target = token.to(tl.int64)[:, None] * TOP_K + choices
    kept = is_token[:, None] & (choices < TOP_K)
    tl.store(weights + target, weight * scale, mask=kept)
    tl.store(ids + target, chosen.to(tl.int64), mask=kept)


def route_topk(
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
    """Choose every token's experts; the caller has checked that the settings fit together.

    Args:
        logits: `[T, E]`, floating.
        top_k: experts per token, at most those of `top_groups` groups.
        sigmoid: score by sigmoid, and groups by their two best experts; else by softmax, and groups by their best.
        bias: `[E]`, added to the scores for the choice, not for the weights.
        num_groups: blocks that the experts are cut into.
        top_groups: groups that a token may visit.
        renormalize: scale the k weights to sum to 1.
        scale: factor on the weights.
        num_tokens: rows from here on are padding, and get expert -1. An integer, or a tensor on the device with one
            integer: the host does not wait for it, and a captured graph reads it in every replay. None for no padding.

    Returns:
        `topk_weights [T, k]` float32 and `topk_ids [T, k]` int64, best first.
    """
    rows, experts = logits.shape
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    if not rows:
        return weights, ids
    logits = rows_contiguous(logits)
    group_size = experts // num_groups
    block_g, block_s = power_of_2(num_groups), power_of_2(group_size)
    block_t = max(1, min(4, _MAX_TILE // (block_g * block_s)))
    _topk_kernel[cdiv(rows, block_t),](
        *(weights, ids),
        *(logits, logits.stride(0), bias, rows, num_tokens, scale),
        GROUPS=num_groups,
        GROUP_SIZE=group_size,
        TOP_GROUPS=top_groups,
        TOP_K=top_k,
        SIGMOID=sigmoid,
        HAS_BIAS=bias is not None,
        BY_TWO=sigmoid and group_size > 1,
        RENORMALIZE=renormalize,
        REAL=0 if num_tokens is None else 2 if isinstance(num_tokens, Tensor) else 1,
        BLOCK_T=block_t,
        BLOCK_G=block_g,
        BLOCK_S=block_s,
        BLOCK_K=power_of_2(top_k),
        num_warps=4,
    )
    return weights, ids
