"""Tokens as batches of rows by expert, and results back: in torch, and nothing is read on the host.

    pair    (token, choice), number token * k + choice
    row     where a pair lies in the batches: expert * C + how many pairs of that expert come before it

All sizes follow from the number of tokens, so that a graph can capture it: `C` is the number of tokens, as many rows as
an expert gets if all of them choose it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batches:
    """Tokens, sorted by expert.

    Attributes:
        hidden_states: `[E, C, H]`, contiguous; undefined behind an expert's rows.
        rows_per_expert: `[E]` int32.
        row_of_pair: `[T * k]` int64; `E * C` for a pair that has none.
        overflowed: `[T, k]` bool: pairs that found no room at their expert; this happens only if a token has chosen an
            expert twice.
    """

    hidden_states: Tensor
    rows_per_expert: Tensor
    row_of_pair: Tensor
    overflowed: Tensor


def sort_pairs(x: Tensor, topk_ids: Tensor, num_experts: int) -> Batches:
    """Give every pair a row; the pairs of one expert keep their order.

    Args:
        x: `[T, H]`.
        topk_ids: `[T, k]`, any integer dtype; ids outside `range(num_experts)` have no row.
    """
    tokens, top_k = topk_ids.shape
    is_expert = (topk_ids >= 0) & (topk_ids < num_experts)
    experts = torch.where(is_expert, topk_ids, num_experts).flatten().long()
    counts = experts.new_zeros(num_experts + 1).scatter_add_(0, experts, torch.ones_like(experts))
    starts = counts.cumsum(0) - counts
    order = experts.argsort(stable=True)
    sorted_experts = experts.index_select(0, order)
    nth = torch.arange(tokens * top_k, device=x.device) - starts.index_select(0, sorted_experts)
    nowhere = num_experts * tokens
    has_room = (sorted_experts < num_experts) & (nth < tokens)
    rows = torch.where(has_room, sorted_experts * tokens + nth, nowhere)
    row_of_pair = torch.empty_like(rows).scatter_(0, order, rows)

    # On a CPU zeros: Triton's interpreter warns of large numbers that happen to be there.
    batches = (x.new_empty if x.is_cuda else x.new_zeros)(nowhere + 1, x.shape[1])
    batches.index_copy_(0, row_of_pair, x[:, None].expand(-1, top_k, -1).reshape(-1, x.shape[1]))
    return Batches(
        batches[:nowhere].view(num_experts, tokens, -1) if nowhere else x.new_empty(num_experts, 0, x.shape[1]),
        counts[:num_experts].clamp(max=tokens).int(),
        row_of_pair,
        is_expert & (row_of_pair == nowhere).view(tokens, top_k),
    )


def sum_pairs(
    rows: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int, gave_up: Tensor | None = None
) -> Tensor:
    """`out[t] = sum over j of topk_weights[t, j] * rows[t, j]`, in float32 and in the order of the choices.

    Args:
        rows: `[T, k, H]`, contiguous; undefined where there is no expert.
        topk_ids: `[T, k]`; ids outside `range(num_experts)` count for nothing.
        topk_weights: `[T, k]` float32.
        gave_up: `[1]` int32, not 0 if the rows are incomplete: then all sums are NaN.

    Returns:
        `[T, H]`, dtype of `rows`.
    """
    if rows.is_cuda:
        from moe.kernels.reduce import sum_choices  # imports Triton

        return sum_choices(rows, topk_ids, 0, num_experts, topk_weights, gave_up)
    is_expert = ((topk_ids >= 0) & (topk_ids < num_experts))[:, :, None]
    total = rows.new_zeros(rows.shape[0], rows.shape[2], dtype=torch.float32)
    for choice in range(rows.shape[1]):
        weighted = rows[:, choice].float() * topk_weights[:, choice, None]
        total = total + torch.where(is_expert[:, choice], weighted, 0.0)
    if gave_up is not None:
        total = torch.where(gave_up != 0, float("nan"), total)
    return total.to(rows.dtype)
