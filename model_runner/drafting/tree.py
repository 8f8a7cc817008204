"""Trees of drafts, grown as in EAGLE-2: wide where the draft network is unsure.

    level 1        the `topk` most likely tokens after the last known one
    next levels    the `topk` most likely tokens after each of the `topk` most likely nodes of the previous level
    at the end     keep the most likely nodes of all levels; a node's probability is the product along its path

A node is never more likely than its parent, so the parents of kept nodes are kept, too.

Source: EAGLE-2 (Li and others, 2024), sections 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model_runner.drafting.runner import DraftRunner
from model_runner.drafting.sampling import DraftBatch
from model_runner.settings import most_nodes
from model_runner.speculation.proposer import Draft


def draft_trees(
    runner: DraftRunner, batch: DraftBatch, hidden: Tensor, counts: Sequence[int], num_steps: int, topk: int
) -> list[Draft]:
    """A tree for every request.

    Args:
        hidden: `[R, hidden_size]`, input of the first level's logits.
        counts: most nodes of each request.
        topk: nodes of a level that are extended, and tokens after each.
    """
    requests = hidden.shape[0]
    chances, tokens = _best_tokens(runner, hidden, topk)
    all_chances, all_tokens = [chances], [tokens]
    all_parents = [torch.full_like(tokens, -1)]
    node = torch.arange(topk, device=hidden.device).expand(requests, -1)  # indices of the level's nodes among all nodes
    hidden = hidden.repeat_interleave(topk, dim=0)
    itself = torch.eye(topk, dtype=torch.bool, device=hidden.device).expand(requests, -1, -1)
    ancestors = itself[:, :, :0]
    for depth in range(num_steps - 1):
        ancestors = torch.cat((ancestors, itself), dim=-1)
        hidden = runner.level(batch, depth, tokens, hidden, ancestors)
        own, next_tokens = _best_tokens(runner, hidden, topk)
        behind = (chances[:, :, None] + own.view(requests, topk, topk)).flatten(1)
        next_tokens = next_tokens.view(requests, -1)
        all_chances.append(behind)
        all_tokens.append(next_tokens)
        all_parents.append(node.repeat_interleave(topk, dim=1))
        if depth == num_steps - 2:
            break
        # The most likely new nodes form the next level.
        chances, chosen = behind.topk(topk, dim=-1)
        parent = chosen // topk
        node = chosen + (most_nodes(depth + 1, topk))
        tokens = next_tokens.gather(1, chosen)
        ancestors = ancestors.gather(1, parent[:, :, None].expand(-1, -1, ancestors.shape[-1]))
        hidden = hidden.view(requests, topk, -1).gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[-1]))
        hidden = hidden.flatten(0, 1)
    everything = (torch.cat(parts, dim=1) for parts in (all_chances, all_tokens, all_parents))
    kept = select_nodes(*everything, count=max(counts))
    trees = runner.read(kept)
    return [Draft(tuple(ids[:most]), tuple(parents[:most])) for (ids, parents), most in zip(trees, counts, strict=True)]


def select_nodes(chances: Tensor, tokens: Tensor, parents: Tensor, *, count: int) -> Tensor:
    """The most likely nodes of each tree, parents before children.

    Args:
        chances: `[R, nodes]`, the logarithm of each node's probability, at most its parent's.
        tokens: `[R, nodes]` int64.
        parents: `[R, nodes]` int64, the parent's index, lower than the node's own; -1 for the root.
        count: number of nodes to keep; if there are fewer, all are kept.

    Returns:
        `[R, 2, count]` int64: tokens, and parents as in `Draft.parents`.
    """
    # Among equally likely nodes the first wins, so a parent comes before its child.
    order = chances.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(dim=-1).values
    number = torch.zeros_like(tokens).scatter_(
        1, order, torch.arange(1, order.shape[1] + 1, device=tokens.device).expand_as(order)
    )
    parent = parents.gather(1, order)
    parent = torch.where(parent < 0, 0, number.gather(1, parent.clamp_min(0)))
    return torch.stack((tokens.gather(1, order), parent), dim=1)


def _best_tokens(runner: DraftRunner, hidden: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the most likely tokens, `[rows, topk]` each."""
    logits = runner.network.compute_logits(hidden).float()
    best = logits.topk(topk, dim=-1)
    return best.values - logits.logsumexp(dim=-1, keepdim=True), best.indices
