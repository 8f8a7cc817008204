"""An engine's inputs and outputs: the types that scheduler, engine, API and offline `LLM` share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

from model_runner import FinishReason, RequestError, SamplingParams, TokenLogprobs
from ubatch import UBatchError


class QueueFull(UBatchError):
    """The queue is full: `max_waiting_requests` requests are waiting. Try again later."""


class EngineDead(UBatchError):
    """An engine process ended, or its step failed; the message names the rank and why. No request can run any more."""


class EngineRestarting(UBatchError):
    """The engines have failed and are started again, and the request could not wait for them. Try again later.

    Attributes:
        retry_after_s: seconds until they should serve again.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PoisonousRequest(UBatchError):
    """The request has ended because it killed an engine each time that it ran, in the end alone. Do not send it again:
    the message says how the engine failed."""


@dataclass(frozen=True)
class RequestInput:
    """One sequence to generate. A prompt with `n` outputs is `n` requests.

    Attributes:
        request_id: unique among requests that have not ended.
        token_ids: the prompt, at least one token.
        params: how to generate.
        priority: lower runs earlier, if the policy is `priority`.
        generated: output tokens that it has already, from an engine that has failed; its next outputs go on after them.
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
    generated: tuple[int, ...] = ()

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
class StartTimes:
    """How long a request took to its first token, by the clock of its engine.

    Attributes:
        queued_s: seconds from its arrival at the engine to the planning of its first step.
        prefilled_s: seconds from then to its first token.
    """

    queued_s: float
    prefilled_s: float


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
        times: in the output with the first token only.
    """

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    drafts: DraftCounts = DraftCounts()
    times: StartTimes | None = None

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
            times=next((part.times for part in parts if part.times is not None), None),
        )


STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
"""Buckets for the tokens of a step, vLLM's: 1, 8, 16, ... 16384."""


@dataclass(frozen=True)
class Metric:
    """How `/metrics` shows a field of `EngineStatistics`.

    Attributes:
        kind: `gauge`, `counter` or `histogram`; prometheus_client adds `_total` to a counter's name.
        name: vLLM's name, or `ubatch:...`.
        text: its help.
        labels: labels besides the model's name and the engine. The field's value is then a mapping, whose keys have the
            labels' values with `/` between them, or a tuple, whose places are the one label's values.
        buckets: upper bounds of a histogram, without infinity. The field's value is as `Observed.told` returns it.
    """

    kind: str
    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class Observed:
    """A histogram while it is counted, in the engine.

    Args:
        buckets: upper bounds, without infinity.
    """

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = buckets
        self._told = [0] * (len(buckets) + 2)

    def add(self, value: int) -> None:
        """Count a value."""
        self._told[0] += value
        self._told[1 + bisect_left(self._buckets, value)] += 1

    @property
    def told(self) -> tuple[int, ...]:
        """The sum of the values, then how many were in each bucket, above the bounds of the lower ones."""
        return tuple(self._told)


def _gauge(name: str, text: str, default: float = 0) -> Any:
    return field(default=default, metadata={Metric: Metric("gauge", name, text)})


def _counter(name: str, text: str, *labels: str, make: Callable[[], Any] = int) -> Any:
    return field(default_factory=make, metadata={Metric: Metric("counter", name, text, labels)})


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
    nothing = Observed(buckets).told
    return field(default=nothing, metadata={Metric: Metric("histogram", name, text, buckets=buckets)})


@dataclass
class SchedulerTotals:
    """A scheduler's totals since it started. The texts of the metrics say what they are."""

    prefix_queries: int = _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
    prefix_hits: int = _counter("vllm:prefix_cache_hits", "Prompt tokens found there.")
    prompt_tokens: int = _counter(
        "vllm:prompt_tokens", "Prompt tokens of requests that began to answer, cached ones included."
    )
    prompt_tokens_cached: int = _counter(
        "vllm:prompt_tokens_cached", "Those of them that the prefix cache had when the request was first admitted."
    )
    generation_tokens: int = _counter("vllm:generation_tokens", "Tokens generated.")
    preemptions: int = _counter("vllm:num_preemptions", "Times that a request lost its KV blocks to others.")
    corrupted_requests: int = _counter("vllm:corrupted_requests", "Requests whose logits were not finite.")
    num_drafts: int = _counter("vllm:spec_decode_num_drafts", "Times that tokens guessed for a request were verified.")
    drafted_tokens: int = _counter("vllm:spec_decode_num_draft_tokens", "Tokens guessed ahead.")
    accepted_tokens: int = _counter("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right.")
    accepted_per_position: tuple[int, ...] = _counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Guessed tokens that were right, by their place among those of a step; the first is 0.",
        "position",
        make=tuple,
    )

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
    """Times of the overlapped steps that were traced, in seconds; sums over these steps."""

    traced_steps: int = _counter("ubatch:traced_steps", "Overlapped steps that were traced for the following times.")
    hidden_s: float = _counter(
        "ubatch:communication_hidden_seconds", "Communication in traced steps while a lane computed.", make=float
    )
    exposed_s: float = _counter(
        "ubatch:communication_exposed_seconds", "Communication in traced steps that a lane waited for.", make=float
    )
    handoff_wait_s: float = _counter(
        "ubatch:handoff_wait_seconds", "Time in traced steps from a hand-off until the next lane ran.", make=float
    )
    communication_s: float = _counter("ubatch:communication_seconds", "Communication in traced steps.", make=float)


@dataclass
class EngineStatistics(SchedulerTotals, TracedTime):
    """One rank's state and its totals since it started, after some step. A field that is declared as a metric is in
    `/metrics`; it is filled where its events happen.

    Attributes:
        kv_usage: blocks that only the prefix cache holds count as free.
        steps: "mode/outcome" -> number of steps; the outcome is `engaged`, `engaged_single` (single-batch overlap) or
            the reason against overlap (`ubatch.DeclineReason`).
        dbo_auto: what the running steps have decided for `decode`, `prefill` and `verify` steps by size, and why; empty
            if thresholds decide.
    """

    num_running: int = _gauge("vllm:num_requests_running", "Requests that have KV blocks.")
    num_waiting: int = _gauge(
        "vllm:num_requests_waiting", "Requests that wait for their first step, or for their next after a preemption."
    )
    kv_usage: float = _gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1.", 0.0)
    steps: Mapping[str, int] = _counter(
        "ubatch:steps",
        "Steps by what they ran, and whether they overlapped (engaged, engaged_single) or why not.",
        *("mode", "outcome"),
        make=dict,
    )
    graph_replays: int = _counter("ubatch:graph_replays", "Steps replayed as CUDA graphs; the others ran eagerly.")
    step_tokens: tuple[int, ...] = _histogram(
        "vllm:iteration_tokens_total", "Tokens that a step ran, of prompts, outputs and guesses.", STEP_TOKENS
    )
    dbo_auto: Mapping[str, str] = field(default_factory=dict)

    def after(self, earlier: EngineStatistics) -> EngineStatistics:
        """These, with the totals of the engine that this one has replaced."""
        totals = [
            each.name for each in fields(self) if Metric in each.metadata and each.metadata[Metric].kind != "gauge"
        ]
        return replace(self, **{name: _sum(getattr(self, name), getattr(earlier, name)) for name in totals})


def _sum(one: Any, other: Any) -> Any:
    """The sum of two totals: numbers, or by key or place."""
    if isinstance(one, Mapping):
        return {key: one.get(key, 0) + other.get(key, 0) for key in {**other, **one}}
    if isinstance(one, Sequence):
        return tuple(map(sum, zip_longest(one, other, fillvalue=0)))
    return one + other
