"""`/v1/completions`: prompts, continued."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from serving.api.answer import Answer, check_common, check_outputs
from serving.api.errors import ApiError
from serving.api.generation import Delta, Output, make_outputs
from serving.api.logprobs import CompletionLogprobsWriter
from serving.api.prompts import check_length, decode, prompts_in, prompts_of
from serving.api.request_models import DEFAULT_MAX_TOKENS, CompletionRequest
from serving.api.response_models import Completion
from serving.api.sampling import sampling_params
from serving.api.service import Service
from serving.api.token_limits import token_limits

__all__ = ["CompletionAnswer"]


_PROMPTS_AT_ONCE = 16  # of a large body; then it is the next one's turn
_LENGTH_AT_ONCE = 100_000  # characters or tokens, likewise; tens of milliseconds


class CompletionAnswer(Answer):
    """A completion in the making; see `make`."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        answer_id: str,
        outputs: Sequence[Output],
        echoes: Sequence[str | None],
    ) -> None:
        super().__init__(service, body, answer_id, outputs)
        self._echoes = echoes  # the text of each prompt, where it is wanted
        self._writers: Mapping[int, CompletionLogprobsWriter] = {}
        if body.logprobs is not None:
            skip = body.skip_special_tokens is not False
            self._writers = {
                output.index: CompletionLogprobsWriter(self._names, body.logprobs, skip_special_tokens=skip)
                for output in outputs
            }

    @classmethod
    async def make(cls, service: Service, body: CompletionRequest, size: int) -> CompletionAnswer:
        """From a request, and how many bytes it has.

        Raises:
            RequestError, ApiError, QueueFull: it cannot be served.
        """
        _refuse(body)
        given = prompts_in(body.prompt)
        check_outputs(service, len(given), body.n)
        limits = await token_limits(service, body, len(given), size)
        room = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        pieces = [
            partial(prompts_of, service, given[first:last], body, room)
            for first, last in _pieces([len(prompt) for prompt in given])
        ]
        prompts = list(chain(*await service.long_work.run_pieces(pieces, size)))
        asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
        requested: list[tuple[Sequence[int], Any]] = []
        for _, token_ids in prompts:
            left = check_length(service, len(token_ids), body.max_tokens, "prompt")
            wanted = min(DEFAULT_MAX_TOKENS, left) if body.max_tokens is None else body.max_tokens
            params = sampling_params(
                body,
                service.defaults,
                max_tokens=max(1, wanted),  # an engine generates at least one
                logprobs=body.logprobs,
                prompt_logprobs=max((count for count in asked if count is not None), default=None),
                limits=limits,
                vocab_size=service.engine.info.vocab_size,
            )
            requested.append((token_ids, params))
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        outputs = make_outputs(service, body, answer_id, requested)
        for output in outputs:
            output.nothing = body.max_tokens == 0
        skip = body.skip_special_tokens is not False
        echoes: list[str | None] = [None] * len(prompts)
        if body.echo:
            echoes = [decode(service, ids, skip_special_tokens=skip) if text is None else text for text, ids in prompts]
        return cls(service, body, answer_id, outputs, echoes)

    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        index = delta.output.index
        begins = self._begins(index)
        echo, logprobs = self._echo(delta) if begins else ("", [])
        text = echo + delta.text
        writer = self._writers.get(index)
        if writer is not None and delta.logprobs:
            logprobs.append(writer.output(delta.logprobs))
        asked = {**(self._of_prompt(delta) if begins else {}), **self._token_ids(delta)}
        if not (text or logprobs or delta.finish_reason or asked):
            return []
        return [
            {
                "index": index,
                "text": text,
                "logprobs": _joined(logprobs) if writer is not None else None,
                "finish_reason": delta.finish_reason,
                **asked,
            }
        ]

    def _whole(self, deltas: Sequence[Sequence[Delta]]) -> Completion:
        choices: list[dict[str, Any]] = []
        for of_output in deltas:
            parts = [part for delta in of_output for part in self._chunk_choices(delta)]
            logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
            choice = {**parts[0], **parts[-1], "text": "".join(part["text"] for part in parts)}
            choices.append(
                {**choice, "logprobs": _joined(logprobs) if logprobs else None, **self._token_ids(*of_output)}
            )
        answer = {**self._about, "object": self.kind, "choices": choices, "usage": self._usage()}
        return Completion.model_validate(answer)

    def _echo(self, delta: Delta) -> tuple[str, list[dict[str, Any]]]:
        """The prompt's text and log-probabilities, which go with the output's first delta."""
        output = delta.output
        echo = self._echoes[output.prompt]
        if echo is None:
            return "", []
        writer = self._writers.get(output.index)
        if writer is None:
            return echo, []
        return echo, [writer.prompt(output.request.token_ids, delta.prompt_logprobs or [], len(echo))]


def _pieces(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each piece of so many prompts begins and ends; a very long prompt is a piece of its own."""
    first = total = 0
    for place, length in enumerate(lengths):
        if place > first and (place - first == _PROMPTS_AT_ONCE or total + length > _LENGTH_AT_ONCE):
            yield first, place
            first, total = place, 0
        total += length
    if lengths:
        yield first, len(lengths)


def _joined(logprobs: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    return {name: [entry for part in logprobs for entry in part[name]] for name in names}


def _refuse(body: CompletionRequest) -> None:
    """Refuse what is not supported, and what contradicts itself."""
    check_common(body)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens may be 0 only with echo, to look at the prompt.", param="max_tokens")
