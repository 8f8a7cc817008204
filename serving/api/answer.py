"""What completions and chat completions have in common: one answer, whole or streamed, made from the same deltas."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel

from serving.api.errors import ApiError
from serving.api.generation import Delta, Output, run_outputs
from serving.api.logprobs import TokenNames, prompt_logprobs
from serving.api.request_log import log_outputs
from serving.api.request_models import GenerationRequest
from serving.api.service import Service
from serving.api.sse import event
from serving.requests import DraftCounts
from serving.text import Vocabulary

__all__ = ["Answer", "check_common", "check_outputs"]


def check_common(body: GenerationRequest) -> None:
    """Refuse fields that contradict each other.

    Raises:
        ApiError: 400.
    """
    if body.stream_options is not None and not body.stream:
        message = "stream_options is only for streams; set stream to true or leave it out."
        raise ApiError(400, message, param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs are not told in streams; leave stream out.", param="prompt_logprobs")
    if body.best_of not in (None, 1, body.n or 1):
        message = f"best_of must be 1 or n ({body.n or 1}), not {body.best_of}: all outputs are returned."
        raise ApiError(400, message, param="best_of")


def check_outputs(service: Service, num_prompts: int, n: int | None) -> None:
    """Refuse a body that asks for more outputs than the server makes at once.

    Raises:
        ApiError: 400.
    """
    limit, outputs = service.max_outputs_per_request, num_prompts * (n or 1)
    if limit is not None and outputs > limit:
        message = (
            f"The request asks for {outputs} outputs ({num_prompts} prompts, n={n or 1}); at most {limit} are made."
        )
        raise ApiError(400, message, param="prompt" if num_prompts > limit else "n")


class Answer(ABC):
    """An answer in the making.

    Args:
        service: what answers.
        body: the request.
        answer_id: of the answer.
        outputs: its choices.
    """

    kind: str
    chunk_kind: str

    def __init__(self, service: Service, body: GenerationRequest, answer_id: str, outputs: Sequence[Output]) -> None:
        if service.log_requests:
            log_outputs(answer_id, outputs, service.max_log_len)
        options = body.stream_options
        self._service = service
        self._body: GenerationRequest = body
        self._names = TokenNames(Vocabulary.of(service.tokenizer), bool(body.return_tokens_as_token_ids))
        self._begun: set[int] = set()  # outputs of which something was told
        self._outputs = outputs
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.include_usage and options.continuous_usage_stats
        self._about: dict[str, Any] = {
            "id": answer_id,
            "created": int(time.time()),
            "model": service.model_name(body.model),
        }

    @abstractmethod
    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices that tell a delta in a stream, each in an event of its own; none if there is nothing to tell."""

    @abstractmethod
    def _whole(self, deltas: Sequence[Sequence[Delta]]) -> BaseModel:
        """The answer from the deltas of every output. What is not asked for is not set."""

    def _first_chunk(self) -> dict[str, Any]:
        """What only the first event of a stream has."""
        return {}

    async def collect(self) -> BaseModel:
        """The whole answer."""
        deltas: list[list[Delta]] = [[] for _ in self._outputs]
        async with aclosing(run_outputs(self._service, self._outputs)) as arriving:
            async for delta in arriving:
                deltas[delta.output.index].append(delta)
        return self._whole(deltas)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer's events, without `[DONE]`."""
        about, first = {**self._about, "object": self.chunk_kind}, self._first_chunk()
        async with aclosing(run_outputs(self._service, self._outputs)) as arriving:
            async for delta in arriving:
                for choice in self._chunk_choices(delta):
                    chunk, first = {**about, "choices": [choice], **first}, {}
                    if self._include_usage:
                        chunk["usage"] = self._usage() if self._continuous_usage else None
                    yield event(chunk)
        if self._include_usage:
            yield event({**about, "choices": [], "usage": self._usage()})

    def _begins(self, index: int) -> bool:
        """Whether nothing was told of an output yet; from now on, something was."""
        begins = index not in self._begun
        self._begun.add(index)
        return begins

    def _token_ids(self, *deltas: Delta) -> dict[str, Any]:
        """The choice's token ids, if they are asked for."""
        if not self._body.return_token_ids:
            return {}
        return {"token_ids": [token for delta in deltas for token in delta.token_ids]}

    def _of_prompt(self, delta: Delta) -> dict[str, Any]:
        """What is asked for of a prompt, given the first delta of an output: its token ids, its log-probabilities."""
        asked: dict[str, Any] = {}
        if self._body.return_token_ids:
            asked["prompt_token_ids"] = list(delta.output.request.token_ids)
        if (num_top := self._body.prompt_logprobs) is not None:
            entries = delta.prompt_logprobs or ()
            asked["prompt_logprobs"] = prompt_logprobs(self._names.vocabulary, entries, num_top)
        return asked

    def _usage(self) -> dict[str, Any]:
        """Tokens up to now. A prompt counts once, whatever its first output found in the prefix cache too."""
        firsts = {output.prompt: output for output in reversed(self._outputs)}.values()
        prompt_tokens = sum(len(output.request.token_ids) for output in firsts)
        completion_tokens = sum(output.num_tokens for output in self._outputs)
        drafts = sum((output.drafts for output in self._outputs), DraftCounts())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": drafts.accepted,
                "rejected_prediction_tokens": drafts.drafted - drafts.accepted,
            },
        }
