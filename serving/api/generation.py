"""Runs a request's outputs concurrently, and yields the new text and tokens of each as deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from model_runner import FAULTS, FinishReason, SamplingParams, TokenLogprobs
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import GenerationRequest
from serving.api.service import Service
from serving.metrics import Siblings
from serving.requests import DraftCounts, RequestInput, RequestOutput
from serving.text.detokenizer import TextStream

_SENT_AT_ONCE = 64  # requests of a body sent to the engine in one turn of the event loop, some 50 us each
_ERRORS = {
    FinishReason.ERROR: (500, "not_finite"),
    FinishReason.NO_TOKEN_LEFT: (400, "no_token_left"),
    FinishReason.GRAMMAR: (400, "grammar"),
}


@dataclass
class Output:
    """One requested output and its state.

    Attributes:
        prompt: index of its prompt in the request.
        nothing: `max_tokens` is 0: the one token that the engine must generate is dropped.
        num_cached_tokens: prompt tokens found in the prefix cache.
        siblings: the outputs of its prompt, for the metrics.
    """

    index: int
    prompt: int
    request: RequestInput
    text: TextStream
    nothing: bool = False
    num_tokens: int = 0
    num_cached_tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    siblings: Siblings = field(default_factory=Siblings)


@dataclass(frozen=True)
class Delta:
    """The new part of an output.

    Attributes:
        token_ids: the new tokens, up to the one that completed a stop string; some may have no text yet.
        prompt_logprobs: of the prompt, if requested; only in the first delta of its first output.
        finish_reason: set in the last delta only.
        matched_stop: the stop string or stop token that ended the output; set with `finish_reason`, if one did.
    """

    output: Output
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    matched_stop: str | int | None = None


async def run_outputs(service: Service, outputs: Sequence[Output]) -> AsyncGenerator[Delta, None]:
    """Generate all outputs; yields the deltas of each in order. Closing the generator aborts the unfinished outputs.

    Raises:
        QueueFull: too many requests wait already.
        UBatchError: the first error of any output; the others are aborted.
    """
    if len(outputs) == 1:
        async with service.entrance:
            service.check_queue()  # from here to the engine nothing is awaited
        async with aclosing(_run(service, outputs[0])) as deltas:
            async for delta in deltas:
                yield delta
        return
    arrived: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    async def forward(output: Output) -> None:
        try:
            async with aclosing(_run(service, output)) as deltas:
                async for delta in deltas:
                    arrived.put_nowait(delta)
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks: list[asyncio.Task[None]] = []
    try:
        async with service.entrance:
            service.check_queue()
            for first in range(0, len(outputs), _SENT_AT_ONCE):
                tasks += [asyncio.create_task(forward(each)) for each in outputs[first : first + _SENT_AT_ONCE]]
                await asyncio.sleep(0)  # let these tasks reach the engine, and other requests' events be handled
        running = len(tasks)
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(service: Service, output: Output) -> AsyncGenerator[Delta, None]:
    request, observer = output.request, service.observer
    observer.started(request, output.siblings)
    reason = "abort"  # unless something else sets it: the client left
    try:
        async with aclosing(service.engine.generate(request)) as steps:
            async for step in steps:
                delta = _take(output, step)
                if step.token_ids:
                    observer.tokens(request.request_id, len(step.token_ids))
                if step.times is not None:
                    observer.began(request.request_id, step.num_cached_tokens, step.times)
                if step.drafts.verified:
                    observer.drafts(request.request_id, step.drafts)
                if delta.finish_reason is not None:
                    reason = delta.finish_reason
                yield delta
                if delta.finish_reason is not None:
                    return
        raise ApiError(500, f"The engine ended request {request.request_id} without a finish reason.")
    except Exception:
        reason = "error"
        raise
    finally:
        observer.finished(request.request_id, reason)


def _take(output: Output, step: RequestOutput) -> Delta:
    """Update an output with the tokens of one step; returns its delta."""
    if step.finish_reason is FinishReason.ABORT:
        raise ApiError(500, f"Request {step.request_id} was aborted by the server.", code="aborted")
    output.num_cached_tokens = max(output.num_cached_tokens, step.num_cached_tokens)
    output.drafts += step.drafts
    if output.nothing:
        finished = step.finish_reason and FinishReason.LENGTH.value
        return Delta(output, "", prompt_logprobs=step.prompt_logprobs, finish_reason=finished)
    text = output.text.take(step)
    if step.finish_reason in _ERRORS and output.text.stopped is None:
        status, code = _ERRORS[step.finish_reason]
        raise ApiError(status, f"Request {step.request_id} ended early: {FAULTS[step.finish_reason]}", code=code)
    before, output.num_tokens = output.num_tokens, output.text.num_tokens
    new, finish = output.num_tokens - before, step.finish_reason
    matched: str | int | None = step.stop_token
    if output.text.stopped is not None:
        finish, matched = FinishReason.STOP, output.text.stopped
    reason = None if finish is None else finish.value
    return Delta(output, text, step.token_ids[:new], step.logprobs[:new], step.prompt_logprobs, reason, matched)


def make_outputs(
    service: Service,
    body: GenerationRequest,
    request_id: str,
    prompts: Sequence[tuple[Sequence[int], Sequence[SamplingParams]]],
    kept: Collection[int] = (),
) -> list[Output]:
    """The outputs of a request: for every prompt (token ids), one per `SamplingParams`.

    Args:
        kept: special tokens that are text whatever `skip_special_tokens` says.
    """
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    outputs: list[Output] = []
    for place, (token_ids, several) in enumerate(prompts):
        siblings = Siblings(len(several))
        for number, own in enumerate(several):
            # A prompt is scored once; see `Answer`.
            scored_already = number > 0 and own.prompt_logprobs is not None
            params = replace(own, prompt_logprobs=None) if scored_already else own
            text = TextStream(
                service.tokenizer,
                prompt=token_ids,
                stop=stop,
                include_stop_str_in_output=bool(body.include_stop_str_in_output),
                skip_special_tokens=body.skip_special_tokens is not False,
                min_tokens=params.min_tokens,
                kept=kept,
            )
            index = len(outputs)
            request = RequestInput(f"{request_id}-{index}", token_ids, params, body.priority or 0, request_id)
            outputs.append(Output(index, place, request, text, siblings=siblings))
    return outputs
