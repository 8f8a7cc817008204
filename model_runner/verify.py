"""Speculative decoding: a step that runs drafts behind a request's last token, and which of them were right.

    rows of a request      last token, draft 1, ..., draft D
    row i says             what comes after draft i (row 0: after the last token)
    accepted               drafts from the first on, for as long as each is what the row before it says
    new tokens             the accepted drafts, and what the row of the last accepted one says: 1 to D + 1

Every row is sampled as it would be alone: with its own draw, and a history that ends in the drafts before it. So what
comes out does not depend on the drafts, greedy or not.

Source: speculative sampling with a deterministic draft (Leviathan and others, 2023), simplified: a seeded request has
one right next token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention import SpecVerifyInput
from model_runner.errors import RequestError
from model_runner.host_copy import to_device
from model_runner.request import ScheduledRequest

__all__ = ["accepted_tokens", "chain_of_drafts", "drafts_per_request"]


def drafts_per_request(shares: Sequence[ScheduledRequest]) -> int:
    """How many drafts every share has; 0 for a step without.

    Raises:
        RequestError: shares differ, or one with drafts is not a decode.
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
    return counts.pop()


def chain_of_drafts(
    num_drafts: int, prefix_lens: Sequence[int], input_ids: Tensor, positions: Tensor
) -> SpecVerifyInput:
    """The verify input of drafts that follow each other: plain causal attention, no mask.

    Args:
        num_drafts: `D` of every request; the last known token is the root of the chain.
        prefix_lens: tokens of each request in the cache.
        input_ids: `[R * (D + 1)]` int64.
        positions: `[R * (D + 1)]` int64.
    """
    requests, rows = len(prefix_lens), num_drafts + 1
    index = torch.arange(requests * rows).view(requests, rows)
    child = torch.tensor([*range(1, rows), -1]).repeat(requests, 1)
    index, child, sibling = to_device((index, child, torch.full_like(child, -1)), input_ids.device)
    return SpecVerifyInput(
        num_draft_tokens=rows,
        prefix_lens=tuple(prefix_lens),
        draft_tokens=input_ids,
        positions=positions,
        custom_mask=None,
        retrieve_index=index,
        retrieve_next_token=child,
        retrieve_next_sibling=sibling,
    )


def accepted_tokens(drafts: Sequence[int], sampled: Sequence[int]) -> tuple[int, ...]:
    """The new tokens of a request.

    Args:
        drafts: `D` of them.
        sampled: what its `D + 1` rows say.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
        accepted += 1
    return tuple(sampled[: accepted + 1])
