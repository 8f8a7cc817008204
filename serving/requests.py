"""An engine's inputs and outputs: the types that scheduler, engine, API and offline `LLM` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from model_runner import FinishReason, RequestError, SamplingParams, TokenLogprobs
from ubatch import UBatchError


class QueueFull(UBatchError):
    """The queue is full: `max_waiting_requests` requests are waiting. Try again later."""


class EngineDead(UBatchError):
    """An engine process ended, or its step failed; the message names the rank and why. No request can run any more."""


@dataclass(frozen=True)
class RequestInput:
    """One sequence to generate. A prompt with `n` outputs is `n` requests.

    Attributes:
        request_id: unique among requests that have not ended.
        token_ids: the prompt, at least one token.
        params: how to generate.
        priority: lower runs earlier, if the policy is `priority`.
        group: groups of requests, such as the outputs of one HTTP body, take turns in the queue; "" makes the request a
            group of its own.

    Raises:
        RequestError: at construction, if `params` is no `SamplingParams`.
    """

    request_id: str
    token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    group: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise RequestError(f"request {self.request_id!r} needs SamplingParams, not a {type(self.params).__name__}.")


@dataclass(frozen=True)
class DraftCounts:
    """Counts of a request's drafts (tokens guessed ahead) over some steps.

    Attributes:
        verified: steps that verified drafts of the request.
        drafted: drafts verified in these steps.
        accepted: drafts that were right.
    """

    verified: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.verified + other.verified, self.drafted + other.drafted, self.accepted + other.accepted)

    @property
    def mean_accepted_length(self) -> float | None:
        """Average tokens per verify step: the accepted drafts, and the token after them. None without drafts."""
        return 1 + self.accepted / self.verified if self.verified else None


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to a request.

    Attributes:
        request_id: the request.
        token_ids: the new tokens; a stop token is the last one. Empty if a request ends without a new token (an abort,
            an error).
        logprobs: one per new token if `params.logprobs` asks for them; else empty.
        prompt_logprobs: one per prompt token (None for the first), in the first output, if `params.prompt_logprobs`
            asks for them; else None.
        finish_reason: why the request ended; None while it runs.
        stop_token: the stop token that ended the request; None if none did.
        num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        drafts: tokens that were guessed ahead, and how many of them are among `token_ids`.
    """

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    drafts: DraftCounts = DraftCounts()

    @classmethod
    def merged(cls, parts: Sequence[RequestOutput]) -> RequestOutput:
        """Several outputs of one request, at least one, in their order, as one."""
        if len(parts) == 1:
            return parts[0]
        return replace(
            parts[-1],
            token_ids=[token for part in parts for token in part.token_ids],
            logprobs=[logprob for part in parts for logprob in part.logprobs],
            prompt_logprobs=parts[0].prompt_logprobs,
            num_cached_tokens=max(part.num_cached_tokens for part in parts),
            drafts=sum((part.drafts for part in parts), DraftCounts()),
        )


@dataclass
class SchedulerTotals:
    """A scheduler's totals since it started.

    Attributes:
        prefix_queries: prompt tokens looked up in the prefix cache.
        prefix_hits: looked-up tokens that were in the prefix cache.
        prompt_tokens: prompt tokens of requests that have their first output token; cached ones included.
        generation_tokens: tokens generated.
        preemptions: times that a request lost its KV blocks to others, and went back to waiting.
        corrupted_requests: requests that ended with `FinishReason.ERROR`: their logits were not finite.
        num_drafts: how often a request's drafts were verified.
        drafted_tokens: drafts that were verified.
        accepted_tokens: drafts that were right.
        accepted_per_position: how often at least 1, 2, ... drafts of a request were right.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    corrupted_requests: int = 0
    num_drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def verified(self, drafts: DraftCounts) -> None:
        """Count the verified drafts of one request in one step."""
        self.num_drafts += drafts.verified
        self.drafted_tokens += drafts.drafted
        self.accepted_tokens += drafts.accepted
        known, accepted = self.accepted_per_position, drafts.accepted
        longer = (*known, *[0] * (accepted - len(known)))
        self.accepted_per_position = tuple(count + (place < accepted) for place, count in enumerate(longer))


@dataclass
class TracedTime:
    """Times of the overlapped steps that were traced, in seconds; sums over these steps.

    Attributes:
        traced_steps: number of these steps.
        hidden_s: communication during which some lane computed.
        exposed_s: communication that a lane waited for.
        handoff_wait_s: from one lane's hand-off until the next lane runs.
        communication_s: all communication.
    """

    traced_steps: int = 0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    handoff_wait_s: float = 0.0
    communication_s: float = 0.0


@dataclass
class EngineStatistics(SchedulerTotals, TracedTime):
    """One rank's state and its totals since it started, after some step.

    Attributes:
        num_running: requests that hold KV blocks, a partly prefilled one included.
        num_waiting: requests that hold no KV blocks.
        kv_usage: share of the KV blocks that requests hold, 0 to 1; blocks only the prefix cache holds count as free.
        steps: "mode/outcome" -> number of steps; the outcome is `engaged`, `engaged_single` (single-batch overlap) or
            the reason against overlap (`ubatch.DeclineReason`).
        graph_replays: steps that were replayed as CUDA graphs; the others ran eagerly.
        dbo_auto: what the running steps have decided for `decode`, `prefill` and `verify` steps by size, and why; empty
            if thresholds decide.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    steps: Mapping[str, int] = field(default_factory=dict)
    graph_replays: int = 0
    dbo_auto: Mapping[str, str] = field(default_factory=dict)
