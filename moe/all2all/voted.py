"""The result of the ranks' vote, for a transport."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ubatch import CommGroup, ConfigError, ForwardContext, dbo_enabled, get_forward_context


def voted_tokens(group: CommGroup) -> tuple[int, ...] | None:
    """Tokens of every rank of `group` in this lane or step; None where the ranks did not vote on it.

    All ranks see the same, None included.
    """
    return tokens_in(get_forward_context(), group)


def tokens_in(context: ForwardContext | None, group: CommGroup) -> tuple[int, ...] | None:
    """`voted_tokens` of a context, which is the current one."""
    known = context.tokens_across_ranks if context is not None else None
    # Outside lanes a zero may also come from a rank that could not tell its tokens; all ranks see the same zero.
    if known is not None and len(known) == group.size and (all(known) or dbo_enabled()):
        return known
    return None


def most_voted_tokens(group: CommGroup) -> int | None:
    """The most tokens that a rank of `group` has in this lane or step; None as in `voted_tokens`."""
    known = voted_tokens(group)
    return None if known is None else max(known)


def unpadded(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, tokens: Sequence[int], group: CommGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's rows without the padding behind the tokens that the ranks voted on, of which there are fewer.

    Args:
        x, topk_ids, topk_weights: see `All2All.dispatch`.
        tokens: of every rank, from the vote.

    Raises:
        ConfigError: there are fewer rows than tokens, or a row behind them is routed to an expert.
    """
    own, rows = tokens[group.rank], topk_ids.shape[0]
    wrong = (
        f"the ranks voted on {own} tokens for rank {group.rank}, but the MoE layer got {rows}. Give the layer the "
        "tokens of the vote, and route padding to no expert (mask_padding)."
    )
    if rows < own:
        raise ConfigError(wrong)
    unrouted = (topk_ids[own:] < 0).all()
    if topk_ids.device.type != "cpu":
        torch._assert_async(unrouted, wrong)  # the host does not wait; the device stops with this message
    elif not unrouted:
        raise ConfigError(wrong)
    return x[:own], topk_ids[:own], topk_weights[:own]
