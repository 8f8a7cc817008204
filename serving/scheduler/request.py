"""The scheduler's state of a request, its share of a planned step, and what can never be served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from attention import KVCacheExhausted
from model_runner import PENDING_TOKEN, FinishReason, Request, RequestError, ScheduledRequest, Step, TokenLogprobs
from serving.requests import DraftCounts, RequestInput
from serving.scheduler.radix_cache import RadixNode


@dataclass(eq=False)
class TrackedRequest(Request):
    """A request from `add` to its end.

    `token_ids` ends with one `PENDING_TOKEN` per step that sampled a token for it and is not processed yet: none in the
    plain loop; in the overlapped loop one, or two between `advance` of a step and `process` of the step before.

    Attributes:
        name: its id, which is a string here.
        group: the HTTP body it belongs to; groups take turns, see `serving.scheduler.waiting`.
        arrived_at: when it was added, in seconds of the scheduler's clock.
        started_at: when its first step was planned; same clock.
        limit: most tokens, prompt and output; the request ends when it has as many.
        ends: token ids that end the output.
        node: the end of its locked path in the prefix cache; None while it waits.
        num_kv_blocks: blocks in its row.
        num_written_tokens: tokens whose keys and values a processed step has written. Other requests may share them.
        num_shared_tokens: written tokens that are in the prefix cache.
        snapshot: of recurrent states, to restore before its next step; None if it begins without, or has begun.
        checkpoints: where its prompt is cut to keep a snapshot, in tokens from its begin.
        num_kept_tokens: tokens of the last snapshot that it began with or kept.
        num_cached_tokens: prompt tokens that the prefix cache had when the request was first admitted.
        incarnation: how often it was retracted. A step of an earlier incarnation counts for tokens, not for KV.
        prefilling: it has a row, and no launched step reaches the end of its tokens.
        verifying: a verify step is in flight, so even the number of its tokens is unknown.
        suspect: its last verify step gave values that are not finite; the next step runs without drafts.
        finished: ended or aborted; results of steps in flight are dropped.
        retracted: it waits again after it had run.
        prompt_logprobs: those of the steps so far, until they are sent with the first output.
        decode_share: its share of a step that runs its last token, the same in all such steps of an incarnation.
    """

    priority: int = 0
    arrival: int = 0
    group: str = ""
    turn: int = 0
    arrived_at: float = 0.0
    started_at: float = 0.0
    limit: int = 0
    ends: frozenset[int] = frozenset()
    node: RadixNode | None = None
    num_kv_blocks: int = 0
    num_written_tokens: int = 0
    num_shared_tokens: int = 0
    snapshot: int | None = None
    checkpoints: tuple[int, ...] = ()
    num_kept_tokens: int = 0
    num_cached_tokens: int | None = None
    incarnation: int = 0
    prefilling: bool = False
    verifying: bool = False
    suspect: bool = False
    finished: bool = False
    retracted: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    decode_share: TrackedShare | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.name = str(self.request_id)

    @property
    def tokens_known(self) -> bool:
        """Whether no step in flight will still add to its tokens."""
        return not self.verifying and self.token_ids[-1] != PENDING_TOKEN

    @property
    def next_stop(self) -> int:
        """How far, in tokens from its begin, its next step may go: to the next checkpoint, or to the last token."""
        return next((stop for stop in self.checkpoints if stop > self.num_computed_tokens), len(self.token_ids))

    @property
    def decodes(self) -> bool:
        """Whether its next step runs its last token and samples another one."""
        return not self.prefilling and not self.verifying and len(self.token_ids) < self.limit

    @property
    def stuck_reason(self) -> FinishReason:
        """Why it ends, if it has no token to go on with."""
        failed = self.grammar is not None and self.grammar.failure
        return FinishReason.GRAMMAR if failed else FinishReason.NO_TOKEN_LEFT

    def new_decode_share(self) -> TrackedShare:
        """Make `decode_share`."""
        self.decode_share = TrackedShare(self, 1, incarnation=self.incarnation)
        return self.decode_share

    def ending(self, tokens: Sequence[int], start: int) -> tuple[int, FinishReason | None]:
        """How many of a step's tokens belong to the output, and the finish reason if the output ends with them.

        A token that ends the output is its last token. `start` is the index of the first new token in `token_ids`.
        """
        fewest = self.num_prompt_tokens + self.params.min_tokens
        for count, token in enumerate(tokens, 1):
            if token in self.ends and start + count >= fewest:
                return count, FinishReason.STOP
            if start + count >= self.limit:
                return count, FinishReason.LENGTH
        return len(tokens), None


@dataclass(frozen=True)
class TrackedShare(ScheduledRequest):
    """A request's share of a step, with the request's state when it was planned; it may have changed when the result
    arrives.

    Attributes:
        request: see `ScheduledRequest`.
        prefill: it computes prompt tokens, or tokens generated before a retraction.
        ends: it reaches the end of its request's tokens, so that a token is sampled.
        incarnation: the request's, at that time.
        num_drafted: proposed drafts, without padding.
        reach: most drafts that can be accepted: all of a chain, the longest path of a tree.
    """

    request: TrackedRequest
    prefill: bool = False
    ends: bool = True
    incarnation: int = 0
    num_drafted: int = 0
    reach: int = 0

    def drafts_right(self, accepted: int) -> DraftCounts:
        """Draft counts without padding; `accepted` counts all accepted drafts, padding included."""
        if not self.num_drafted:
            return DraftCounts()
        return DraftCounts(1, self.num_drafted, min(accepted, self.reach))


def plan_step(decodes: Sequence[TrackedRequest], prefills: Sequence[tuple[TrackedRequest, int]]) -> Step:
    """A step that runs one token of each request in `decodes`; `prefills` has (request, number of tokens)."""
    shares = [request.decode_share or request.new_decode_share() for request in decodes]
    for request, count in prefills:
        ends = count == request.num_uncomputed_tokens
        shares.append(TrackedShare(request, count, prefill=True, ends=ends, incarnation=request.incarnation))
    # Only a share that samples needs the tokens before it.
    return Step.of(shares, delay_sampling=needs_history([share.request for share in shares if share.ends]))


def needs_history(requests: Sequence[TrackedRequest]) -> bool:
    """Whether sampling for one of them needs the tokens before."""
    return True in [request.params.needs_history for request in requests]


def shares_of(step: Step) -> tuple[TrackedShare, ...]:
    """The shares of a step that this scheduler has planned."""
    return cast("tuple[TrackedShare, ...]", step.shares)


def check_input(
    given: RequestInput, *, vocab_size: int, eos_token_ids: Sequence[int], max_model_len: int, max_kv_tokens: int
) -> None:
    """Refuse a request that could never get a token.

    Raises:
        RequestError: the prompt is empty, has a token that is not an int or outside the vocabulary, or leaves no room
            for an output; or the sampling parameters forbid every first token.
        KVCacheExhausted: the prompt alone does not fit the KV cache.
    """
    name, tokens = given.request_id, given.token_ids
    if not tokens:
        raise RequestError(f"the prompt of request {name!r} is empty; give at least one token.")
    for kind in set(map(type, tokens)) - {int}:
        raise RequestError(f"the prompt of request {name!r} has a {kind.__name__}; a token is a Python int.")
    _check_vocabulary(name, "the prompt", tokens, vocab_size)
    for what, own in given.params.named_tokens():
        _check_vocabulary(name, what, own, vocab_size)
    given.params.check_choice(eos_token_ids)
    if len(tokens) + 1 > max_model_len:
        raise RequestError(
            f"the prompt of request {name!r} has {len(tokens)} tokens; with one of output that is more than "
            f"max_model_len ({max_model_len})."
        )
    if len(tokens) > max_kv_tokens:
        raise KVCacheExhausted(
            f"the prompt of request {name!r} has {len(tokens)} tokens, the whole KV cache holds {max_kv_tokens} of one "
            "request. Shorten the prompt, or raise --kv-cache-memory or --gpu-memory-utilization."
        )


def _check_vocabulary(name: str, what: str, tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise RequestError(f"{what} of request {name!r} has token {wrong}; the vocabulary is 0 to {vocab_size - 1}.")
