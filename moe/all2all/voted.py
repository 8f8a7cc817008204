"""The result of the ranks' vote, for a transport."""

from __future__ import annotations

from ubatch import CommGroup, dbo_enabled, get_forward_context

__all__ = ["most_voted_tokens", "voted_tokens"]


def voted_tokens(group: CommGroup) -> tuple[int, ...] | None:
    """Tokens of every rank of `group` in this lane or step; None where the ranks did not vote on it.

    All ranks see the same, None included.
    """
    context = get_forward_context()
    known = context.tokens_across_ranks if context is not None else None
    # Outside lanes a zero may also come from a rank that could not tell its tokens; all ranks see the same zero.
    if known is not None and len(known) == group.size and (all(known) or dbo_enabled()):
        return known
    return None


def most_voted_tokens(group: CommGroup) -> int | None:
    """The most tokens that a rank of `group` has in this lane or step; None as in `voted_tokens`."""
    known = voted_tokens(group)
    return None if known is None else max(known)
