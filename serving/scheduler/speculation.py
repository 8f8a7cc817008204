"""Which drafts a decode step carries along, so that one step may give several tokens of a request.

    room        as many drafts as step, context and free KV blocks allow; blocks are reserved for all of them
    propose     the proposer's guesses, chains or trees, of the requests that still want more than one token
    fill        every request gets as many drafts as the one with the most

Every request of a verify step has equally many drafts, because the step is split by requests: those with fewer, or
none, are filled up. Filled-up drafts cost compute, and are right as rarely as one would think. Where steps are replayed
as CUDA graphs all are filled up to the most there may be (`fill_drafts`): an eager step costs more.

Blocks come first because a draft model writes keys and values while it drafts. What a request does not use of them it
needs some tokens later anyway. Rejected drafts' keys and values are never shared: the prefix cache only takes pages
that are full of tokens the request has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runner import Draft, Proposer
from serving.scheduler.config import SchedulerConfig
from serving.scheduler.kv_manager import KVManager
from serving.scheduler.request import TrackedRequest
from ubatch import ConfigError

__all__ = ["Speculation", "VerifyDrafts", "depth_of"]


@dataclass(frozen=True)
class VerifyDrafts:
    """The drafts of a step, one entry per request.

    Attributes:
        drafts: equally many each.
        num_real: how many of them were proposed; the rest only fills up.
        reach: how many proposed ones may be right at once: all of a chain, of a tree its longest path.
    """

    drafts: tuple[Draft, ...]
    num_real: tuple[int, ...]
    reach: tuple[int, ...]


class Speculation:
    """Drafts for decode steps.

    Args:
        config: how many drafts.
        kv: where the drafts' keys and values go.
        max_tokens: of a request, prompt, output and drafts.
        proposer: who guesses; None for nobody.

    Raises:
        ConfigError: drafts without a proposer, or the other way round.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager, max_tokens: int, proposer: Proposer | None) -> None:
        if (proposer is None) != (config.num_speculative_tokens == 0):
            who = "nobody proposes them" if proposer is None else "there is a proposer"
            raise ConfigError(
                f"num_speculative_tokens is {config.num_speculative_tokens}, but {who}. Give both, or neither."
            )
        self._config = config
        self._kv = kv
        self._max_tokens = max_tokens
        self._proposer = proposer

    def draft(self, requests: Sequence[TrackedRequest]) -> VerifyDrafts | None:
        """Drafts for a step of these requests, with KV blocks reserved; None where the step should be a plain one.

        Nobody is retracted for drafts, and a step has drafts only if all tokens are known.
        """
        if self._proposer is None or not all(request.tokens_known for request in requests):
            return None
        most = self._reserve(requests)
        # A step gives one token more than it has drafts that are right.
        wanted = [max(0, min(most, request.limit - len(request.token_ids) - 1)) for request in requests]
        asked = [index for index, count in enumerate(wanted) if count]
        if not asked:
            return None
        proposed = self._proposer.propose([requests[index] for index in asked], [wanted[index] for index in asked])
        drafts = [Draft(())] * len(requests)
        for index, draft in zip(asked, proposed, strict=True):
            drafts[index] = draft
        count = max(len(draft.tokens) for draft in drafts)
        if count == 0:
            return None
        if self._config.fill_drafts:
            count = most
        filled = [_filled(draft, count, r.token_ids[-1]) for draft, r in zip(drafts, requests, strict=True)]
        return VerifyDrafts(tuple(filled), tuple(len(draft.tokens) for draft in drafts), tuple(map(depth_of, drafts)))

    def forget(self, request: TrackedRequest) -> None:
        """A request ended, or lost its KV."""
        if self._proposer is not None:
            self._proposer.forget(request)

    def _reserve(self, requests: Sequence[TrackedRequest]) -> int:
        """Reserve blocks for drafts of every request, equally many; returns how many, none where there is no room."""
        room = self._max_tokens - max(len(request.token_ids) for request in requests)
        places = self._config.num_draft_places
        if room < places:
            return 0
        most = min(self._config.num_speculative_tokens, self._config.max_num_batched_tokens // len(requests) - 1, room)
        while most > 0:
            ends = [len(request.token_ids) + max(most, places) for request in requests]
            needed = [
                max(0, self._kv.blocks_for(end) - request.num_kv_blocks)
                for request, end in zip(requests, ends, strict=True)
            ]
            if sum(needed) <= self._kv.num_available:
                for request, blocks, end in zip(requests, needed, ends, strict=True):
                    if blocks:
                        self._kv.reserve(request, end)
                return most
            most = 0 if most <= places else most - 1
        return 0


def depth_of(draft: Draft) -> int:
    """Drafts on the longest path from the root."""
    if draft.parents is None:
        return len(draft.tokens)
    depths = [0]
    for parent in draft.parents:
        depths.append(depths[parent] + 1)
    return max(depths)


def _filled(draft: Draft, count: int, last_token: int) -> Draft:
    """As many drafts as asked: the last one repeated, each behind the one before."""
    have = len(draft.tokens)
    if have == count:
        return draft
    filler = draft.tokens[-1] if have else last_token
    tokens = (*draft.tokens, *[filler] * (count - have))
    parents = None if draft.parents is None else (*draft.parents, *range(have, count))
    return Draft(tokens, parents, None if draft.probs is None else _certain(draft.probs, filler, count))


def _certain(probs: Tensor, token: int, count: int) -> Tensor:
    """With rows for drafts that nobody drew: all of the probability on their token."""
    rows = torch.zeros(count, probs.shape[1], dtype=probs.dtype, device=probs.device)
    rows[: probs.shape[0]] = probs
    rows[probs.shape[0] :, token] = 1
    return rows
