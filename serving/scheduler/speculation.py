"""Chooses the drafts of a decode step, so that one step may give a request several tokens.

    room        how many drafts the step, the context and the free KV blocks allow; reserves blocks for all of them
    propose     the proposer's drafts (chains or trees), for requests that want more than one more token
    cut         what a request's grammar refuses, and all that follows it
    fill        pad every request to as many drafts as the one with the most

Every request of a verify step has the same number of drafts, because the step is split by requests: requests with fewer
or no drafts are padded. Padding costs compute and is rarely accepted. Where steps are replayed as CUDA graphs, all are
padded to `num_speculative_tokens` (`fill_drafts`), because an eager step would cost more.

Blocks are reserved first because a draft model writes keys and values while it drafts. Unused blocks are needed a few
tokens later anyway. Keys and values of rejected drafts are never shared: the prefix cache only takes pages that are
full of the request's tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_runner import Draft, Proposer, Step
from serving.scheduler.config import SchedulerConfig
from serving.scheduler.kv_manager import KVManager
from serving.scheduler.request import TrackedRequest, TrackedShare, needs_history
from ubatch import ConfigError


class Speculation:
    """Drafts for decode steps.

    Args:
        max_tokens: most tokens of a request: prompt, output and drafts.

    Raises:
        ConfigError: the config asks for drafts and there is no proposer, or the other way round.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager, max_tokens: int, proposer: Proposer | None) -> None:
        if (proposer is None) != (config.num_speculative_tokens == 0):
            who = "there is no proposer" if proposer is None else "there is a proposer"
            raise ConfigError(
                f"num_speculative_tokens is {config.num_speculative_tokens}, but {who}. Give both, or neither."
            )
        self._config = config
        self._kv = kv
        self._max_tokens = max_tokens
        self._proposer = proposer
        self.drafting = False

    def plan(self, requests: Sequence[TrackedRequest]) -> Step | None:
        """A step that verifies drafts of these requests, with KV blocks reserved; None if it should run without drafts.

        No request is retracted for drafts, and a step has drafts only if all tokens of its requests are known.
        """
        if self._proposer is None or not all(request.tokens_known for request in requests):
            return None
        most = self._reserve(requests)
        # A step gives one token more than it accepts drafts.
        wanted = [max(0, min(most, request.limit - len(request.token_ids) - 1)) for request in requests]
        asked = [index for index, count in enumerate(wanted) if count]
        if not asked:
            return None
        self.drafting = True
        proposed = self._proposer.propose([requests[index] for index in asked], [wanted[index] for index in asked])
        drafts = [Draft(())] * len(requests)
        for index, draft in zip(asked, proposed, strict=True):
            drafts[index] = draft if requests[index].grammar is None else _obeying(requests[index], draft)
        self.drafting = False
        count = max(len(draft.tokens) for draft in drafts)
        if count == 0:
            return None
        if self._config.fill_drafts:
            count = most
        shares = [_verifying(request, draft, count) for request, draft in zip(requests, drafts, strict=True)]
        return Step.of(shares, delay_sampling=needs_history(requests))

    def forget(self, request: TrackedRequest) -> None:
        """Drop the proposer's state of a request that ended or lost its KV."""
        if self._proposer is not None:
            self._proposer.forget(request)

    def _reserve(self, requests: Sequence[TrackedRequest]) -> int:
        """Reserve blocks for the same number of drafts of every request; returns the number, 0 if there is no room."""
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
    """Number of drafts on the longest path from the root."""
    if draft.parents is None:
        return len(draft.tokens)
    depths = [0]
    for parent in draft.parents:
        depths.append(depths[parent] + 1)
    return max(depths)


def _obeying(request: TrackedRequest, draft: Draft) -> Draft:
    """A draft without the tokens that its request's grammar refuses, and without all that follow these.

    A refused token that was drawn stays, as the last: acceptance by rejection draws another one in its place, from a
    distribution that takes into account that this one was drawn.
    """
    grammar = request.grammar_after(len(request.token_ids))
    if draft.parents is None:
        count = grammar.count_allowed(draft.tokens)
        if draft.probs is None:
            return Draft(draft.tokens[:count])
        return Draft(draft.tokens[: count + 1], probs=draft.probs[: count + 1])
    paths: dict[int, tuple[int, ...]] = {0: ()}  # of the nodes that stay, in their new order
    tokens, parents = [], []
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), 1):
        if parent not in paths:
            continue
        path = (*paths[parent], token)
        if grammar.count_allowed(path) == len(path):
            tokens.append(token)
            parents.append(list(paths).index(parent))
            paths[node] = path
    return Draft(tuple(tokens), tuple(parents))


def _verifying(request: TrackedRequest, draft: Draft, count: int) -> TrackedShare:
    """A request's share of a step that verifies its draft, padded to `count` tokens."""
    filled = _filled(draft, count, request.token_ids[-1])
    return TrackedShare(
        *(request, 1, filled.tokens, filled.parents, filled.probs),
        incarnation=request.incarnation,
        num_drafted=len(draft.tokens),
        reach=depth_of(draft),
    )


def _filled(draft: Draft, count: int, last_token: int) -> Draft:
    """A draft padded to `count` tokens: its last token repeated, each a child of the one before."""
    have = len(draft.tokens)
    if have == count:
        return draft
    filler = draft.tokens[-1] if have else last_token
    tokens = (*draft.tokens, *[filler] * (count - have))
    parents = None if draft.parents is None else (*draft.parents, *range(have, count))
    return Draft(tokens, parents, None if draft.probs is None else _certain(draft.probs, filler, count))


def _certain(probs: Tensor, token: int, count: int) -> Tensor:
    """`probs` with rows added for the padding, up to `count`: probability 1 for `token`."""
    rows = torch.zeros(count, probs.shape[1], dtype=probs.dtype, device=probs.device)
    rows[: probs.shape[0]] = probs
    rows[probs.shape[0] :, token] = 1
    return rows
