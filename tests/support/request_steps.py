"""Requests, and steps of a runner that give them tokens: prompts, in chunks or not, and drafts that are verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model_runner import Draft, ModelRunner, Request, SamplingParams, ScheduledRequest, StepOutput


def admitted(runner: ModelRunner, prompts: Sequence[Sequence[int]], room: int = 64, **params: Any) -> list[Request]:
    """Requests with rows and blocks for `room` more tokens each."""
    requests = [Request(index, list(prompt), SamplingParams(**params)) for index, prompt in enumerate(prompts)]
    admit(runner, requests, room)
    return requests


def admit(runner: ModelRunner, requests: Sequence[Request], room: int) -> None:
    """Give requests rows, and blocks for `room` more tokens each."""
    for request in requests:
        runner.admit(request, request.num_tokens + room)


def step(runner: ModelRunner, shares: Sequence[ScheduledRequest]) -> StepOutput:
    """Run a step and take its tokens over."""
    output = runner.execute(shares)
    for share, new in zip(shares, output.tokens, strict=True):
        share.request.num_computed_tokens += len(new) if share.drafts else share.num_tokens
        share.request.token_ids += new
    return output


def prefill(runner: ModelRunner, requests: Sequence[Request], chunk: int = 1000) -> None:
    """All prompts to their ends, at most `chunk` tokens of each per step."""
    while waiting := [request for request in requests if request.num_computed_tokens < request.num_prompt_tokens]:
        lens = [min(chunk, request.num_uncomputed_tokens) for request in waiting]
        step(runner, [ScheduledRequest(request, length) for request, length in zip(waiting, lens, strict=True)])


def verify(runner: ModelRunner, requests: Sequence[Request], drafts: Sequence[Draft]) -> StepOutput:
    """One verify step."""
    pairs = zip(requests, drafts, strict=True)
    return step(
        runner, [ScheduledRequest(request, 1, draft.tokens, draft.parents, draft.probs) for request, draft in pairs]
    )


def counts(output: StepOutput) -> list[int]:
    """How many tokens each request got."""
    return [len(new) for new in output.tokens]
