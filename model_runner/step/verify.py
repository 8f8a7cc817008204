"""Speculative decoding: a verify step runs drafts after a request's last token.

    rows of a request      last token (the root), draft 1, ..., draft D; drafts are a chain, or a tree
    a row's token          the model's token after this row's draft, given the drafts on its path
    accepted               drafts from the root on, as long as each equals the token of its parent's row
    new tokens             the accepted drafts, and the token of the last accepted one's row: 1 to D + 1

Acceptance is described in `model_runner.speculation.accept`, the layout of trees in a batch in
`model_runner.step.draft_trees`. After a step the keys and values of accepted drafts are moved next to each other, to
the slots of their positions: node i was written to position prefix + i. In a chain they are there already.
"""

from __future__ import annotations

from collections.abc import Sequence

from model_runner.errors import RequestError
from model_runner.step.draft_trees import check_parents
from model_runner.step.request import ScheduledRequest

__all__ = ["drafts_per_request"]


def drafts_per_request(shares: Sequence[ScheduledRequest]) -> int:
    """Number of drafts of every share; 0 for a step without drafts.

    Raises:
        RequestError: the numbers differ, a share with drafts is not a decode, or its drafts are no tree.
    """
    if not any(share.drafts for share in shares):
        return 0
    counts = {len(share.drafts) for share in shares}
    if len(counts) > 1:
        raise RequestError(f"the shares of a verify step have {sorted(counts)} drafts; all must have equally many.")
    for share in shares:
        if share.num_tokens != 1 or not share.samples:
            raise RequestError(
                f"request {share.request.request_id!r} has drafts, {share.num_tokens} tokens in this step and "
                f"{share.request.num_uncomputed_tokens} to run; drafts need exactly one of each."
            )
        if min(share.drafts) < 0:
            raise RequestError(f"request {share.request.request_id!r} has draft {min(share.drafts)}; it is no token.")
        if share.parents is not None:
            check_parents(share.request.request_id, share.parents, len(share.drafts))
    return counts.pop()
