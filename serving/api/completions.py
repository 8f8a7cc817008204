"""`/v1/completions`: continues prompts."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from model_runner import SamplingParams
from serving.api.answer import SCORED_AT_ONCE, Answer, Gathered, check_common, check_logprobs, check_outputs
from serving.api.generation import Delta, Output, make_outputs
from serving.api.logprobs import COMPLETION_LISTS, CompletionLogprobsWriter, JsonLists
from serving.api.prompts import check_length, decode, prompts_in, prompts_of
from serving.api.sampling import allowed_tokens, output_grammar, sampling_params
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import DEFAULT_MAX_TOKENS, CompletionRequest, GenerationRequest
from serving.api.service import Service

_PROMPTS_AT_ONCE = 16  # prompts of a large body tokenized in one piece of work; then another body has its turn
_LENGTH_AT_ONCE = 100_000  # most characters or tokens of such a piece: tens of milliseconds


class CompletionAnswer(Answer):
    """A completion while it is generated; made by `make`."""

    kind = chunk_kind = "text_completion"
    lists = COMPLETION_LISTS

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        answer_id: str,
        outputs: Sequence[Output],
        echoes: Sequence[str | None],
    ) -> None:
        super().__init__(service, body, answer_id, outputs)
        self._prompts = prompts_in(body.prompt)
        self._echoes = echoes  # the text of each prompt; None without `echo`
        self._echoes_scored: dict[int, JsonLists] = {}  # prompt -> log-probabilities of its echo
        self._writers: Mapping[int, CompletionLogprobsWriter] = {}
        if body.logprobs is not None:
            self._writers = {
                output.index: self._writer(body.logprobs, len(echoes[output.prompt] or ""), output.request.token_ids)
                for output in outputs
            }

    @classmethod
    async def make(cls, service: Service, body: CompletionRequest, size: int) -> CompletionAnswer:
        """Make the answer of a request whose body has `size` bytes.

        Raises:
            RequestError, ApiError, QueueFull: the request cannot be served.
        """
        check_common(body)
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens may be 0 only with echo, to look at the prompt.", param="max_tokens")
        given = prompts_in(body.prompt)
        check_outputs(service, len(given), body.n)
        limits = await allowed_tokens(service, body, len(given), size)
        limits = replace(limits, grammar=await output_grammar(service, body))
        room = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        pieces = [
            partial(prompts_of, service, given[first:last], body, room)
            for first, last in _pieces([len(prompt) for prompt in given])
        ]
        prompts = list(chain(*await service.long_work.run_pieces(pieces, size)))
        asked = [count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None]
        requested: list[tuple[Sequence[int], list[SamplingParams]]] = []
        for _, token_ids in prompts:
            left = check_length(service, len(token_ids), {"max_tokens": body.max_tokens}, "prompt")
            default = service.default_max_tokens(left, DEFAULT_MAX_TOKENS)
            params = sampling_params(
                service,
                body,
                max_tokens=default if body.max_tokens is None else max(1, body.max_tokens),  # an engine makes one
                logprobs=body.logprobs,
                prompt_logprobs=max(asked, default=None),
                limits=limits,
            )
            requested.append((token_ids, params))
        num_scored = sum(len(token_ids) * len(params) for token_ids, params in requested)
        of_outputs = chain.from_iterable(params for _, params in requested)
        check_logprobs(num_scored * sum(count + 1 for count in asked), of_outputs, body, kept=not body.stream)
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        outputs = make_outputs(service, body, answer_id, requested)
        for output in outputs:
            output.nothing = body.max_tokens == 0
        echoes: list[str | None] = [None] * len(prompts)
        if body.echo:
            echoes = [
                decode(service, ids, skip_special_tokens=_skips_special(body, sent)) if text is None else text
                for sent, (text, ids) in zip(given, prompts, strict=True)
            ]
        return cls(service, body, answer_id, outputs, echoes)

    def _writer(self, num_top: int, offset: int, prompt: Sequence[int]) -> CompletionLogprobsWriter:
        skip = self._body.skip_special_tokens is not False
        return CompletionLogprobsWriter(self._names, num_top, skip_special_tokens=skip, offset=offset, prompt=prompt)

    def _logprobs_of(self, delta: Delta) -> Mapping[str, Sequence[Any]]:
        return self._writers[delta.output.index].write([(entry.token, entry) for entry in delta.logprobs])

    def _score(self, delta: Delta) -> JsonLists:
        """Also the log-probabilities of the echoed prompt, which come first in the choice's lists."""
        scored = super()._score(delta)
        writer, entries = self._writers.get(delta.output.index), delta.prompt_logprobs or ()
        echo = self._echoes[delta.output.prompt]
        if writer is None or echo is None:
            return scored
        lists = self._echoes_scored[delta.output.prompt] = JsonLists(self.lists)
        skip = _skips_special(self._body, self._prompts[delta.output.prompt])
        own = CompletionLogprobsWriter(self._names, writer.num_top, skip_special_tokens=skip)
        for first in range(0, len(entries), SCORED_AT_ONCE):
            some = slice(first, first + SCORED_AT_ONCE)
            written = own.write(list(zip(delta.output.request.token_ids[some], entries[some], strict=True)))
            lists.add({**written, "text_offset": [min(offset, len(echo)) for offset in written["text_offset"]]})
        return scored

    def _echoed(self, output: Output) -> tuple[str, JsonLists]:
        """What precedes an output's own text and log-probabilities: its prompt's with `echo`, otherwise nothing."""
        lists = JsonLists(self.lists)
        if (scored := self._echoes_scored.get(output.prompt)) is not None:
            lists.extend(scored)
        return self._echoes[output.prompt] or "", lists

    def _choice(
        self, output: Output, text: str, logprobs: JsonLists, part: Delta | Gathered, *, begins: bool
    ) -> dict[str, Any]:
        """A choice of the whole answer, or of an event. `begins`: it is the output's first."""
        return {
            "index": output.index,
            "text": text,
            "logprobs": logprobs.raw() if output.index in self._writers else None,
            **self._end(part),
            **(self._prompt_token_ids(output) if begins else {"prompt_token_ids": None}),
            **self._token_ids(part.token_ids),
        }

    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        output = delta.output
        begins = self._begins(output.index)
        text, logprobs = self._echoed(output) if begins else ("", JsonLists(self.lists))
        text += delta.text
        if output.index in self._writers and delta.logprobs:
            logprobs.add(self._logprobs_of(delta))
        choice = self._choice(output, text, logprobs, delta, begins=begins)
        told = text or logprobs or delta.finish_reason or choice["token_ids"] is not None
        return [choice] if told else []

    def _whole(self, gathered: Sequence[Gathered]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for output, known in zip(self._outputs, gathered, strict=True):
            text, logprobs = self._echoed(output)
            logprobs.extend(known.logprobs)
            choice = self._choice(output, "".join((text, *known.text)), logprobs, known, begins=True)
            choices.append({**choice, **self._prompt_logprobs(output), "routed_experts": None})
        return self._with_choices(choices)


def _pieces(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Split prompts of these lengths into pieces of work; yields (first, end). A very long prompt is a piece alone."""
    first = total = 0
    for place, length in enumerate(lengths):
        if place > first and (place - first == _PROMPTS_AT_ONCE or total + length > _LENGTH_AT_ONCE):
            yield first, place
            first, total = place, 0
        total += length
    if lengths:
        yield first, len(lengths)


def _skips_special(body: GenerationRequest, prompt: Any) -> bool:
    """Whether an echo leaves out special tokens. As in vLLM, a prompt of token ids is echoed with all of them."""
    return isinstance(prompt, str) and body.skip_special_tokens is not False
