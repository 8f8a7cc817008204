"""A step between its launch and its result.

    runner.launch     the batch is built and its forward runs, or is queued on the device
    step.sample       its tokens, on the device; the next step may be launched now
    step.result       its tokens, on the host

The overlap loop does something else in between: it launches the next step before it asks for this one's result, and
it samples late where sampling depends on tokens that the step before has not told yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from model_runner.errors import RequestError, StepOrderError
from model_runner.future_map import FutureMap
from model_runner.host_copy import HostCopy, to_device, to_host
from model_runner.input_batch import InputBatch
from model_runner.logprobs import (
    PromptCarry,
    PromptScores,
    TokenLogprobs,
    read_logprobs,
    score_prompt_rows,
    score_tokens,
)
from model_runner.penalties import SamplingRow
from model_runner.request import PENDING_TOKEN, ScheduledRequest
from model_runner.sampler import sample
from model_runner.step_streams import StepStreams
from model_runner.verify import accepted_tokens
from ubatch import Decision, ForwardMode

__all__ = ["PendingStep", "SamplingContext", "StepOutput"]


@dataclass(frozen=True)
class StepOutput:
    """What a step gave.

    Attributes:
        tokens: per share its new tokens: none where the step did not reach the end of its tokens, else one, or in a
            verify step the accepted drafts and one more.
        logprobs: per share, one per new token where `params.logprobs` asks for them; else empty.
        prompt_logprobs: per share, one per prompt token of this step (None for a prompt's first) where
            `params.prompt_logprobs` asks for them; else empty.
        decision: whether the step overlapped, or why not; with every rank's tokens.
        all_idle: no rank had a token; nothing ran.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...]
    prompt_logprobs: tuple[tuple[TokenLogprobs | None, ...], ...]
    decision: Decision
    all_idle: bool


@dataclass(frozen=True)
class SamplingContext:
    """What sampling needs of the runner, the same for every step.

    Attributes:
        compute_logits: from hidden states to logits.
        vocab_size: numbers of a row of logits.
        eos_token_ids: of the model, those in its vocabulary.
        future_map: tokens that the host does not know yet.
        prompt_carry: of prompts that run in chunks.
        together: errors inside reach the other ranks.
        streams: what steps run on.
    """

    compute_logits: Callable[[Tensor], Tensor]
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    future_map: FutureMap
    prompt_carry: PromptCarry
    together: Callable[[], AbstractContextManager[None]]
    streams: StepStreams


@dataclass(frozen=True)
class _Sampled:
    """What `sample` started to copy to the host."""

    tokens: HostCopy
    scores: HostCopy | None = None
    scored_rows: Sequence[int] = ()
    prompt: PromptScores | None = None


class PendingStep:
    """One step that was launched. `ModelRunner.launch` makes it.

    Args:
        context: of the runner.
        batch: what runs.
        decision: how it runs.
        logits: `[S, vocab]` of the batch's `logits_rows`; None where nothing is sampled.
        prompt_hidden: hidden states of the rows of the batch's prompt spans; None where there are none.
        all_idle: no rank has a token; nothing runs.
    """

    def __init__(
        self,
        context: SamplingContext,
        batch: InputBatch,
        decision: Decision,
        logits: Tensor | None,
        prompt_hidden: Tensor | None = None,
        *,
        all_idle: bool = False,
    ) -> None:
        self.decision = decision
        self.all_idle = all_idle
        self._context = context
        self._batch = batch
        self._logits = logits
        self._prompt_hidden = prompt_hidden
        self._sampled: _Sampled | None = None
        self._output: StepOutput | None = None

    # -- sample -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def sample(self) -> None:
        """Choose the tokens, on the device, and queue their copy to the host; once, in the order of the steps.

        Raises:
            StepOrderError: it was called before.
            RequestError: a request's sampling needs tokens before its own that are not known yet, or its bias is for
                tokens that the model does not have.
        """
        streams = self._context.streams
        with self._context.together(), streams.forward():
            if self._sampled is not None:
                raise StepOrderError("sample() was called twice on a step; its tokens are drawn once.")
            streams.keep(self._batch.future_places)  # uploaded for the block of the launch
            self._sampled = self._sample()
            self._logits = self._prompt_hidden = None

    def _sample(self) -> _Sampled:
        batch, logits = self._batch, self._logits
        prompt = self._score_prompts()
        if logits is None:
            return _Sampled(HostCopy(torch.empty(0, dtype=torch.int64)), prompt=prompt)
        rows, scored = self._special_rows()
        tokens = sample(logits, rows)
        if batch.future_owners:
            self._context.future_map.store(batch.future_places, tokens, batch.future_owners)
        if not scored:
            return _Sampled(to_host(tokens), prompt=prompt)
        (where,) = to_device([torch.tensor(list(scored))], logits.device)
        most = max(scored.values())
        scores = score_tokens(logits.index_select(0, where), tokens.index_select(0, where), most)
        return _Sampled(to_host(tokens), to_host(scores), tuple(scored), prompt)

    def _special_rows(self) -> tuple[dict[int, SamplingRow], dict[int, int]]:
        """Rows that ask for more than the argmax: how to sample them, and how many top log-probabilities to list."""
        rows: dict[int, SamplingRow] = {}
        scored: dict[int, int] = {}
        next_row = 0
        for share, length, count in zip(
            self._batch.scheduled, self._batch.lengths, self._batch.rows_per_share, strict=True
        ):
            params = share.request.params
            if not params.plain:
                for offset in range(count):
                    if not params.greedy or params.adjusts:
                        rows[next_row + offset] = self._sampling_row(share, length, offset)
                    if params.logprobs is not None:
                        scored[next_row + offset] = params.logprobs
            next_row += count
        return rows, scored

    def _sampling_row(self, share: ScheduledRequest, length: int, offset: int) -> SamplingRow:
        """How the row behind `offset` drafts of a request is sampled, which had `length` tokens at the launch."""
        request, params = share.request, share.request.params
        index = length - request.num_prompt_tokens + offset
        if not params.needs_history:
            return SamplingRow(params, request.draw(index))
        output = request.token_ids[request.num_prompt_tokens : length]
        if PENDING_TOKEN in output:
            raise RequestError(
                f"request {request.request_id!r} has penalties or min_tokens, but its token "
                f"{request.num_prompt_tokens + output.index(PENDING_TOKEN)} is not known yet. Sample this step after "
                f"the result of the step before."
            )
        forbidden = params.ending_tokens(self._context.eos_token_ids) if index < params.min_tokens else ()
        if not params.penalised:
            return SamplingRow(params, request.draw(index), forbidden=forbidden)
        output += share.drafts[:offset]
        return SamplingRow(params, request.draw(index), request.prompt_vocabulary, output, forbidden)

    def _score_prompts(self) -> PromptScores | None:
        spans, hidden = self._batch.prompt_spans, self._prompt_hidden
        if hidden is None:
            return None
        targets = torch.tensor([token for span in spans for token in span.targets], dtype=torch.int64)
        (targets,) = to_device([targets], hidden.device)
        most = max(span.request.params.prompt_logprobs or 0 for span in spans)
        context = self._context
        return PromptScores(spans, score_prompt_rows(hidden, targets, most, context.compute_logits, context.vocab_size))

    # -- result -------------------------------------------------------------------------------------------------

    def result(self) -> StepOutput:
        """Wait for the tokens. Steps are read in their order; reading one again gives the same.

        Raises:
            StepOrderError: `sample` was not called yet.
            PeerFailed, GroupBroken, TransferTimeout: on a GPU, another rank did not take part in the step.
        """
        if self._output is None:
            with self._context.together():
                if self._sampled is None:
                    raise StepOrderError("result() was called before sample().")
                self._output = self._read(self._sampled)
        return self._output

    def _read(self, sampled: _Sampled) -> StepOutput:
        batch = self._batch
        tokens = iter(sampled.tokens.wait().tolist())
        drawn = [tuple(islice(tokens, count)) for count in batch.rows_per_share]
        new = drawn
        if batch.mode is ForwardMode.TARGET_VERIFY:
            new = [accepted_tokens(share.drafts, own) for share, own in zip(batch.scheduled, drawn, strict=True)]
        nothing: tuple[tuple[()], ...] = ((),) * len(new)
        logprobs: Sequence[tuple[TokenLogprobs, ...]] = nothing
        if sampled.scores is not None:
            logprobs = self._read_logprobs(new, sampled.scored_rows, sampled.scores.wait().tolist())
        prompt: Sequence[tuple[TokenLogprobs | None, ...]] = nothing
        if sampled.prompt is not None:
            read = sampled.prompt.read(self._context.prompt_carry)
            prompt = [read.get(index, ()) for index in range(len(new))]
        return StepOutput(tuple(new), tuple(logprobs), tuple(prompt), self.decision, self.all_idle)

    def _read_logprobs(
        self, new: Sequence[tuple[int, ...]], rows: Sequence[int], scores: list[list[float]]
    ) -> list[tuple[TokenLogprobs, ...]]:
        by_row = dict(zip(rows, scores, strict=True))
        read: list[tuple[TokenLogprobs, ...]] = []
        first = 0
        for share, tokens, count in zip(self._batch.scheduled, new, self._batch.rows_per_share, strict=True):
            wanted = share.request.params.logprobs
            if wanted is None:
                read.append(())
            else:
                read.append(read_logprobs(tokens, [by_row[first + offset] for offset in range(len(tokens))], wanted))
            first += count
        return read
