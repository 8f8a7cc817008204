"""A request as the scheduler keeps it, and a step as the scheduler planned it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from model_runner import PENDING_TOKEN, Draft, Request, ScheduledRequest, TokenLogprobs
from serving.requests import DraftCounts, RequestInput
from serving.scheduler.radix_cache import RadixNode

__all__ = ["ScheduledStep", "TrackedRequest"]


@dataclass(eq=False)
class TrackedRequest(Request):
    """One request from `add` to its end.

    `token_ids` ends with one `PENDING_TOKEN` for every step that sampled for it and was not processed yet: none in the
    plain loop; in the overlap loop one, and two between `advance` of a step and `process` of the one before.

    Attributes:
        priority: lower runs earlier, where the policy asks.
        arrival: a number that grows with every request.
        group: whose turn it takes, see `serving.scheduler.admission.waiting`.
        turn: when, among those that wait.
        limit: tokens, prompt and output, with which it ends at the latest.
        ends: tokens that end it.
        node: the end of its locked path in the prefix cache; None while it waits.
        num_kv_blocks: blocks in its row.
        num_written_tokens: tokens whose keys and values a processed step has written. What others may share.
        num_shared_tokens: those of them that went into the prefix cache or came from it.
        num_cached_tokens: prompt tokens that the prefix cache had when it was first admitted.
        incarnation: how often it was retracted. A result of an earlier incarnation brings tokens, but no KV.
        prefilling: it has a row, and no step was launched that reaches the end of its tokens.
        verifying: a verify step was launched, so that not even the number of its tokens is known.
        suspect: a verify step of it was not finite; the next one is without drafts.
        finished: ended or aborted; results that are still to come are dropped.
        retracted: it waits, and had started before.
        prompt_logprobs: of the steps so far, until the first output takes them along.
    """

    priority: int = 0
    arrival: int = 0
    group: str = ""
    turn: int = 0
    limit: int = 0
    ends: frozenset[int] = frozenset()
    node: RadixNode | None = None
    num_kv_blocks: int = 0
    num_written_tokens: int = 0
    num_shared_tokens: int = 0
    num_cached_tokens: int | None = None
    incarnation: int = 0
    prefilling: bool = False
    verifying: bool = False
    suspect: bool = False
    finished: bool = False
    retracted: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @classmethod
    def of(cls, given: RequestInput, *, arrival: int, limit: int, eos_token_ids: Collection[int]) -> TrackedRequest:
        """A request that has just come."""
        params = given.params
        return cls(
            given.request_id,
            list(given.token_ids),
            params,
            priority=given.priority,
            arrival=arrival,
            group=given.group or given.request_id,
            limit=limit,
            ends=frozenset(params.ending_tokens(eos_token_ids)),
        )

    @property
    def name(self) -> str:
        """Its id, which is a string here."""
        return str(self.request_id)

    @property
    def tokens_known(self) -> bool:
        """Whether no step in flight will still add to its tokens."""
        return not self.verifying and self.token_ids[-1] != PENDING_TOKEN

    @property
    def decodes(self) -> bool:
        """Whether its next step runs its last token and samples another one."""
        return not self.prefilling and not self.verifying and len(self.token_ids) < self.limit


@dataclass(frozen=True)
class ScheduledStep:
    """A step, and how its requests stood when it was planned: they may have moved on when its result comes.

    Attributes:
        shares: what the executor runs.
        requests: whose each share is.
        samples: whether each share reaches the end of its request's tokens.
        starts: tokens of each that were in the KV cache before.
        incarnations: of each.
        prefills: whether each computes tokens that were given, or generated before a retraction.
        num_drafted: proposed drafts of each share; those that only fill it up are not counted.
        reach: how many of these may be right at once; fewer where they are a tree.
        delay_sampling: some request's sampling depends on tokens that may still be pending.
        verify: the shares carry drafts.
    """

    shares: tuple[ScheduledRequest, ...] = ()
    requests: tuple[TrackedRequest, ...] = ()
    samples: tuple[bool, ...] = ()
    starts: tuple[int, ...] = ()
    incarnations: tuple[int, ...] = ()
    prefills: tuple[bool, ...] = ()
    num_drafted: tuple[int, ...] = ()
    reach: tuple[int, ...] = ()
    delay_sampling: bool = False
    verify: bool = False

    @classmethod
    def plain(cls, decodes: Sequence[TrackedRequest], prefills: Sequence[tuple[TrackedRequest, int]]) -> ScheduledStep:
        """A step that runs one token of each of `decodes`, and so many of each of `prefills`."""
        requests = (*decodes, *(request for request, _ in prefills))
        samples = [True] * len(decodes) + [count == request.num_uncomputed_tokens for request, count in prefills]
        shares = [ScheduledRequest(request, 1) for request in decodes]
        shares += [ScheduledRequest(request, count) for request, count in prefills]
        return cls._of(
            requests,
            shares=tuple(shares),
            samples=tuple(samples),
            prefills=(False,) * len(decodes) + (True,) * len(prefills),
            # Only a share that samples needs to know the tokens before.
            delay_sampling=any(
                request.params.needs_history for request, own in zip(requests, samples, strict=True) if own
            ),
        )

    @classmethod
    def verifying(
        cls,
        decodes: Sequence[TrackedRequest],
        drafts: Sequence[Draft],
        num_drafted: Sequence[int],
        reach: Sequence[int],
    ) -> ScheduledStep:
        """A step that verifies the drafts of each of `decodes`; `num_drafted` and `reach` as the attributes."""
        return cls._of(
            tuple(decodes),
            shares=tuple(
                ScheduledRequest(request, 1, draft.tokens, draft.parents, draft.probs)
                for request, draft in zip(decodes, drafts, strict=True)
            ),
            samples=(True,) * len(decodes),
            prefills=(False,) * len(decodes),
            num_drafted=tuple(num_drafted),
            reach=tuple(reach),
            delay_sampling=any(request.params.needs_history for request in decodes),
            verify=True,
        )

    @classmethod
    def _of(cls, requests: tuple[TrackedRequest, ...], **what: Any) -> ScheduledStep:
        starts = tuple(request.num_computed_tokens for request in requests)
        return cls(requests=requests, starts=starts, incarnations=tuple(r.incarnation for r in requests), **what)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs, drafts too."""
        return sum(share.num_tokens + len(share.drafts) for share in self.shares)

    def drafts_right(self, index: int, accepted: int) -> DraftCounts:
        """A share's proposed drafts, and how many were right, where `accepted` of all were, those that fill up too."""
        if not self.verify or not self.num_drafted[index]:
            return DraftCounts()
        return DraftCounts(1, self.num_drafted[index], min(accepted, self.reach[index]))
