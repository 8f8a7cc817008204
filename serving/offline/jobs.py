"""A prompt that runs: its outputs so far, from the engine's steps to vLLM's `RequestOutput`."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from model_runner import FinishReason, TokenLogprobs
from serving.offline.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestStateStats,
    TokenTable,
    token_table,
    token_tables,
)
from serving.offline.sampling_params import RequestOutputKind
from serving.requests import DraftCounts, RequestInput
from serving.requests import RequestOutput as Step
from serving.text.detokenizer import TextStream
from serving.text.tokenizer import Vocabulary


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
