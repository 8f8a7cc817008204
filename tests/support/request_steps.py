"""Requests, and steps of a runner that give them tokens: prompts, in chunks or not, and drafts that are verified.

A request's next step may be launched before the last one is read, as the overlapped loop does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from model_runner import (
    PENDING_TOKEN,
    Draft,
    ModelRunner,
    PendingStep,
    Request,
    SamplingParams,
    ScheduledRequest,
    StepOutput,
)


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


@dataclass
class Ahead:
    """See above.

    Attributes:
        late: sample after the step before is read, as for sampling that needs its tokens.
        fake: fake streams whose operations are named after the step.
        unread: the last step, which nobody has read.
        outputs: of all steps that were read.
    """

    runner: ModelRunner
    requests: list[Request]
    late: bool = False
    fake: Any = None
    number: int = 0
    unread: PendingStep | None = None
    outputs: list[StepOutput] = field(default_factory=list)

    @classmethod
    def admit(
        cls, runner: ModelRunner, prompts: Sequence[list[int]], params: Sequence[SamplingParams], **options: Any
    ) -> Ahead:
        """Requests with room for what they ask for."""
        requests = [Request(index, *each) for index, each in enumerate(zip(prompts, params, strict=True))]
        for request in requests:
            runner.admit(request, request.num_tokens + request.params.max_tokens)
        return cls(runner, requests, **options)

    def launch(self) -> PendingStep:
        """The next step; sampled, unless that is late."""
        shares = [ScheduledRequest(request, request.num_uncomputed_tokens) for request in self.requests]
        self._tag("launch", self.number)
        step = self.runner.launch(shares)
        for share in shares:
            share.request.advance(share.num_tokens, PENDING_TOKEN)
        if not self.late:
            self.sample(step)
        return step

    def sample(self, step: PendingStep) -> None:
        """Sample a step that was launched."""
        self._tag("sample", self.number)
        step.sample()

    def read(self, step: PendingStep) -> None:
        """Its tokens take the place of those that were pending."""
        self.outputs.append(step.result())
        for request, (token,) in zip(self.requests, self.outputs[-1].tokens, strict=True):
            request.token_ids[request.token_ids.index(PENDING_TOKEN)] = token

    def run(self, steps: int) -> list[list[int]]:
        """So many steps, each launched before the last one is read; the tokens of every request, which are released."""
        for _ in range(steps):
            step = self.launch()
            self._read_last()
            if self.late:
                self.sample(step)
            self.unread = step
            self.number += 1
        self._read_last()
        for request in self.requests:
            self.runner.release(request)
        return [request.output_token_ids for request in self.requests]

    def _read_last(self) -> None:
        if self.unread is not None:
            self._tag("read", self.number - 1)
            self.read(self.unread)
        self.unread = None

    def _tag(self, what: str, number: int) -> None:
        if self.fake is not None:
            self.fake.tag = f"{what} {number} "
