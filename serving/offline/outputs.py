"""What `LLM` and `AsyncLLM` return, with vLLM's names and attributes; metrics; jobs, whose steps become outputs."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, TypeAlias

from model_runner import FAULTS, FinishReason, TokenLogprobs
from serving.offline.sampling_params import RequestOutputKind
from serving.requests import DraftCounts, EngineStatistics, RequestInput
from serving.requests import Metric as Told
from serving.requests import RequestOutput as Step
from serving.text.detokenizer import TextStream
from serving.text.tokenizer import Vocabulary


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token, under the model's own distribution.

    Attributes:
        logprob: its natural logarithm.
        rank: 1 is the most likely token.
        decoded_token: the token's text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenTable: TypeAlias = dict[int, Logprob]
"""Token -> its log-probability; the sampled token (of a prompt: the prompt's own) comes first, then the likeliest."""


@dataclass
class CompletionOutput:
    """One output of a prompt.

    Attributes:
        index: its place among the prompt's outputs.
        text: detokenised, without the stop string or stop token; empty without a tokenizer, or with `detokenize=False`.
        token_ids: the generated tokens, the stop token included.
        cumulative_logprob: sum of the tokens' log-probabilities; None if `logprobs` did not ask for them.
        logprobs: one table per token, if `logprobs` asked for them; else None.
        finish_reason: `stop`, `length`, `abort`, or a failure: `error` (the logits are not finite) or `no_token_left`
            (the sampling parameters forbid every token); `error` then describes it. None while it runs.
        stop_reason: the stop string or stop token that ended the text; None if neither did, or the tokenizer's own end
            token.
        lora_request: always None.
        drafts: tokens guessed ahead, and how many of them were right.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenTable] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    lora_request: None = None
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def error(self) -> str | None:
        """Why generation failed; None if it did not."""
        return None if self.finish_reason is None else FAULTS.get(FinishReason(self.finish_reason))

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass
class RequestStateStats:
    """When things happened to a request.

    Attributes:
        num_generation_tokens: tokens of all outputs.
        arrival_time: when it was made, in seconds since 1970.
        first_token_ts: when its first token came, in seconds of a monotonic clock; 0 before.
        last_token_ts: the same of its last token.
        first_token_latency: seconds from its arrival to its first token; 0 before.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass
class RequestOutput:
    """A prompt and its outputs.

    Attributes:
        request_id: unique among the requests of an `LLM`.
        prompt: the prompt's text; None if it was given as tokens.
        prompt_token_ids: the prompt's tokens.
        prompt_logprobs: one table per prompt token (None for the first) if `prompt_logprobs` asks for them; else None.
        outputs: `n` of them; while a request streams, those that have something new.
        finished: whether all outputs have ended.
        metrics: when things happened.
        lora_request, encoder_prompt, encoder_prompt_token_ids, kv_transfer_params: always None.
        num_cached_tokens: prompt tokens whose keys and values were in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenTable | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None


def token_table(entry: TokenLogprobs, num_top: int, vocabulary: Vocabulary | None) -> TokenTable:
    """The token and the `num_top` likeliest ones."""

    def described(token: int, logprob: float, rank: int) -> Logprob:
        text = None if vocabulary is None else vocabulary.piece(token).decode(errors="replace")
        return Logprob(logprob, rank, text)

    table = {entry.token: described(entry.token, entry.logprob, entry.rank)}
    for rank, (token, logprob) in enumerate(entry.top[:num_top], start=1):
        if token not in table:
            table[token] = described(token, logprob, rank)
    return table


def token_tables(
    entries: Sequence[TokenLogprobs | None], num_top: int, vocabulary: Vocabulary | None
) -> list[TokenTable | None]:
    """The tables of several tokens; None for one without a log-probability, the first of a prompt."""
    return [None if entry is None else token_table(entry, num_top, vocabulary) for entry in entries]


# -- a prompt that runs, and its outputs so far ------------------------------------------------------------------------


@dataclass
class RunningOutput:
    """One output of a prompt.

    Attributes:
        request: what the engine was asked.
        text: its text; None if it has none.
        at_once: nobody looks at the text before the end, so that it is made then, all at once.
        silent_stop: the stop token that is no `stop_reason`: the tokenizer's own end token.
        told: tokens and characters that the last `RequestOutput` had.
    """

    index: int
    request: RequestInput
    text: TextStream | None
    at_once: bool
    silent_stop: int | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    told: tuple[int, int] = (0, 0)

    def take(self, step: Step) -> bool:
        """Add what a step of the engine gave; False once the output needs no more tokens."""
        self.token_ids += step.token_ids
        self.logprobs += step.logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, step.num_cached_tokens)
        self.drafts += step.drafts
        self.finish_reason = step.finish_reason
        if step.stop_token is not None and step.stop_token != self.silent_stop:
            self.stop_reason = step.stop_token
        if self.text is not None and not self.at_once:
            self.text.take(step)
        elif self.text is not None and step.finish_reason is not None:
            whole = Step(step.request_id, self.token_ids, finish_reason=step.finish_reason, stop_token=step.stop_token)
            self.text.take(whole)
        if self.text is not None and self.text.stopped is not None:
            count = self.text.num_tokens
            del self.token_ids[count:], self.logprobs[count:]
            self.stop_reason, self.finish_reason = self.text.stopped, FinishReason.STOP
        return self.finish_reason is None

    def completion(self, vocabulary: Vocabulary | None, *, delta: bool = False) -> CompletionOutput:
        """The output so far; with `delta` what is new since the last call."""
        text = "" if self.text is None else self.text.text
        num_top = self.request.params.logprobs
        first, begin = self.told if delta else (0, 0)
        self.told = len(self.token_ids), len(text)
        tables: list[TokenTable] | None = None
        if num_top is not None:
            tables = [token_table(entry, num_top, vocabulary) for entry in self.logprobs[first:]]
        return CompletionOutput(
            self.index,
            text[begin:],
            self.token_ids[first:],
            None if num_top is None else sum(entry.logprob for entry in self.logprobs),
            tables,
            None if self.finish_reason is None else self.finish_reason.value,
            self.stop_reason,
            drafts=self.drafts,
        )


@dataclass
class Job:
    """A prompt that runs, with all its outputs.

    Attributes:
        prompt: its text; None if only tokens were given.
        vocabulary: names the tokens of log-probabilities; None without a tokenizer.
    """

    request_id: str
    prompt: str | None
    token_ids: Sequence[int]
    outputs: Sequence[RunningOutput]
    vocabulary: Vocabulary | None
    kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    interval: int = 1
    prompt_logprobs: list[TokenTable | None] | None = None
    arrival_time: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0

    @property
    def requests(self) -> list[RequestInput]:
        """What the engine is asked: a request per output."""
        return [output.request for output in self.outputs]

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    def take(self, index: int, step: Step) -> bool:
        """Add what a step gave to an output; False once that one needs no more tokens."""
        if step.token_ids:
            self.last_token_ts = time.monotonic()
            self.first_token_ts = self.first_token_ts or self.last_token_ts
        output = self.outputs[index]
        num_top = output.request.params.prompt_logprobs
        if step.prompt_logprobs is not None and num_top is not None:
            self.prompt_logprobs = token_tables(step.prompt_logprobs, num_top, self.vocabulary)
        return output.take(step)

    def abort(self) -> None:
        """End the outputs that run."""
        for output in self.outputs:
            output.finish_reason = output.finish_reason or FinishReason.ABORT

    def to_yield(self, changed: Collection[int]) -> list[int]:
        """Of the outputs that have changed, those whose news `AsyncLLM.generate` yields now."""
        if self.kind is RequestOutputKind.FINAL_ONLY:
            return list(range(len(self.outputs))) if self.finished else []
        return [each for each in sorted(changed) if self._is_due(self.outputs[each])]

    def _is_due(self, output: RunningOutput) -> bool:
        known = output.told[0]
        return output.finish_reason is not None or known == 0 or len(output.token_ids) - known >= self.interval

    def result(self, indices: Sequence[int] | None = None) -> RequestOutput:
        """The request with these of its outputs; all by default."""
        delta = self.kind is RequestOutputKind.DELTA
        shown = self.outputs if indices is None else [self.outputs[each] for each in indices]
        arrived = self.first_token_ts - self.began if self.first_token_ts else 0.0
        num_tokens = sum(len(output.token_ids) for output in self.outputs)
        return RequestOutput(
            self.request_id,
            self.prompt,
            list(self.token_ids),
            self.prompt_logprobs,
            [output.completion(self.vocabulary, delta=delta) for output in shown],
            self.finished,
            RequestStateStats(num_tokens, self.arrival_time, self.first_token_ts, self.last_token_ts, arrived),
            num_cached_tokens=self.outputs[0].num_cached_tokens,
        )


# -- the engines' metrics as `LLM.get_metrics` returns them: vLLM's classes and names ----------------------------------


@dataclass(frozen=True)
class Metric:
    """A metric of one data-parallel rank.

    Attributes:
        name: as in `/metrics`, a counter's without `_total`.
        labels: `engine`, the rank, and the metric's own.
    """

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A total since the start."""

    value: float


@dataclass(frozen=True)
class Gauge(Metric):
    """A state after the last step."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Totals by place."""

    values: list[int]


@dataclass(frozen=True)
class Histogram(Metric):
    """Values counted by size.

    Attributes:
        buckets: upper bound as text -> how many values are not above it; the last one is `+Inf`.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(statistics: Mapping[int, EngineStatistics]) -> list[Metric]:
    """The metrics of all ranks. Histograms of requests are a server's alone; see `RequestOutput.metrics`."""
    return [metric for rank, each in statistics.items() for metric in _of_rank(each, {"engine": str(rank)})]


def _of_rank(statistics: EngineStatistics, labels: dict[str, str]) -> Iterator[Metric]:
    for each in fields(statistics):
        about = each.metadata.get(Told)
        if about is not None:
            yield from _read(about, getattr(statistics, each.name), labels)


def _read(about: Told, value: Any, labels: dict[str, str]) -> Iterator[Metric]:
    kind = Gauge if about.kind == "gauge" else Counter
    if isinstance(value, Mapping):
        for key, number in value.items():
            yield kind(about.name, labels | dict(zip(about.labels, key.split("/"), strict=False)), number)
    elif about.kind == "histogram":
        total, *counts = value
        bounds = [*map(str, getattr(about, "buckets", ())), "+Inf"]
        yield Histogram(about.name, labels, sum(counts), total, dict(zip(bounds, accumulate(counts), strict=True)))
    elif isinstance(value, Sequence):
        yield Vector(about.name, labels, list(value))
    else:
        yield kind(about.name, labels, value)
