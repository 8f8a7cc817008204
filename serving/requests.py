"""What goes into an engine and what comes out: the words that scheduler, engine, API and offline `LLM` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from model_runner import FinishReason, RequestError, SamplingParams, TokenLogprobs
from ubatch import UBatchError

__all__ = ["DraftCounts", "EngineDead", "EngineStatistics", "QueueFull", "RequestInput", "RequestOutput"]


class QueueFull(UBatchError):
    """As many requests wait as `max_waiting_requests` allows. Try again later."""


class EngineDead(UBatchError):
    """An engine process ended, or its step failed; the message names the rank and why. Nothing runs any more."""


@dataclass(frozen=True)
class RequestInput:
    """One sequence to generate. A prompt with `n` outputs is `n` of these.

    Attributes:
        request_id: unique among the requests that are alive.
        token_ids: the prompt, at least one token.
        params: how to generate.
        priority: lower runs earlier, where the policy is `priority`.
        group: requests of one group, such as the outputs of one HTTP body, take turns with others; empty stands alone.

    Raises:
        RequestError: at construction, if `params` are none.
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
    """Tokens that were guessed ahead, in some steps of a request.

    Attributes:
        verified: steps that verified drafts of it.
        drafted: drafts in these steps.
        accepted: drafts that were right.
    """

    verified: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.verified + other.verified, self.drafted + other.drafted, self.accepted + other.accepted)

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens that a verify step gave on average, the one after the accepted drafts too; None without drafts."""
        return 1 + self.accepted / self.verified if self.verified else None


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to a request.

    Attributes:
        request_id: whose.
        token_ids: the new tokens; a stop token is the last one. Empty where a request ends without one (an
            abort, an error).
        logprobs: one per new token, where `params.logprobs` asks for them; else empty.
        prompt_logprobs: one per prompt token (None for the first), with the first output, where
            `params.prompt_logprobs` asks for them; else None.
        finish_reason: why it ended; None while it goes on.
        stop_token: the token that ended it, where a token did.
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


@dataclass(frozen=True)
class EngineStatistics:
    """One rank's state and its totals since it started, after some step.

    Attributes:
        num_running: requests with KV, the chunked one too.
        num_waiting: requests without.
        kv_usage: share of the KV blocks that requests hold, 0 to 1; blocks only the prefix cache holds count as free.
        prefix_queries: prompt tokens looked up in the prefix cache.
        prefix_hits: those of them that were found.
        prompt_tokens: prompt tokens of the requests whose first token came, cached ones included.
        generation_tokens: tokens generated.
        preemptions: requests that were retracted for want of KV.
        corrupted_requests: requests that ended with `FinishReason.ERROR`: their logits were not finite.
        num_drafts: how often a request's drafts were verified.
        drafted_tokens: drafts in all of these.
        accepted_tokens: those that were right.
        accepted_per_position: how often at least 1, 2, ... drafts of a request were.
        steps: "mode/outcome" -> steps; the outcome is `engaged`, `engaged_single` (single-batch overlap) or why
            not (`ubatch.DeclineReason`).
        graph_replays: steps that were replayed as CUDA graphs; the others ran eagerly.
        dbo_auto: what `--dbo-auto` has decided for `decode`, `prefill` and `verify` steps, and why; empty without it.
        traced_steps: overlapped steps that were traced to measure the following.
        hidden_s: communication in them during which some lane computed.
        exposed_s: communication in them for which a lane waited.
        handoff_wait_s: time in them between one lane's hand-off and the next one's running.
        communication_s: communication in them, in all.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
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
    steps: Mapping[str, int] = field(default_factory=dict)
    graph_replays: int = 0
    dbo_auto: Mapping[str, str] = field(default_factory=dict)
    traced_steps: int = 0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    handoff_wait_s: float = 0.0
    communication_s: float = 0.0
