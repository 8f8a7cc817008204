"""`/v1/chat/completions`: answers conversations."""

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self

from serving.api import prompts
from serving.api.answer import NOT_ENDED, Answer, Gathered, check_common, check_logprobs, check_outputs
from serving.api.generation import Delta, Output, make_outputs
from serving.api.logprobs import chat_logprobs
from serving.api.sampling import allowed_tokens, sampling_params
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import ChatCompletionRequest, ChatMessage
from serving.api.service import Service
from serving.api.turns import OutputTurn, hidden_marks, turn_grammar, turn_plan
from serving.turns.parsers import Before, make_turn_parser

_NOTHING_ELSE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls", *prompts.REASONING))
"""What a message has besides its text, null where it has none."""


class ChatAnswer(Answer):
    """A chat completion while it is generated; made by `make`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    lists = ("content",)
    id_prefix = "chatcmpl-"
    keeps_logprobs = False  # a stream's last events repeat them

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        answer_id: str,
        outputs: Sequence[Output],
        text: str,
        turns: Mapping[int, OutputTurn],
    ) -> None:
        super().__init__(service, body, answer_id, outputs)
        self._turns = turns
        self._with_logprobs = bool(body.logprobs)
        # If the prompt does not begin the assistant's turn, the answer continues the last message, in its role.
        last = body.messages[-1]
        self._role = service.response_role if body.begins_turn else last.role
        self._echo = ""
        if body.echo and last.role == self._role:
            self._echo = _written(_content(service, last), text)
        self.num_opening = 2 if self._echo else 1  # the role, and the echo

    @classmethod
    async def make(cls, service: Service, body: ChatCompletionRequest, size: int) -> Self:
        """Make the answer of a request whose body has `size` bytes.

        Raises:
            RequestError, ApiError, QueueFull: the request cannot be served.
        """
        check_common(body)
        prompts.check_conversation(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
        check_outputs(service, 1, body.n)
        plan = turn_plan(service, body)
        limits = await allowed_tokens(service, body, 1, size)
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        text, token_ids = await service.long_work.run(lambda: _text_and_ids(service, body, wanted or 1), size)
        if not token_ids:
            raise ApiError(400, "The messages have no tokens; there is nothing to answer.", param="messages")
        before = Before(text, None if body.begins_turn else _content(service, body.messages[-1]))
        grammar = await turn_grammar(service, body, plan, before)
        asked = {"max_tokens": body.max_tokens, "max_completion_tokens": body.max_completion_tokens}
        left = prompts.check_length(service, len(token_ids), asked, "messages")
        params = sampling_params(
            service,
            body,
            max_tokens=service.default_max_tokens(left, left) if wanted is None else wanted,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            limits=replace(limits, grammar=grammar),
        )
        of_prompt = 0 if body.prompt_logprobs is None else len(token_ids) * (body.prompt_logprobs + 1)
        check_logprobs(of_prompt, params, body, kept=cls.keeps_logprobs or not body.stream)
        answer_id = f"{cls.id_prefix}{uuid.uuid4().hex}"
        hidden = hidden_marks(service, body, plan)
        outputs = make_outputs(service, body, answer_id, [(token_ids, params)], kept=frozenset(hidden.values()))
        streamed = bool(body.stream)
        turns = {
            output.index: OutputTurn(
                make_turn_parser(service.turns, plan, before=before, streamed=streamed, hidden=hidden),
                named=isinstance(plan.forced, str),
                streamed=streamed,
                with_reasoning=body.include_reasoning is not False,
            )
            for output in outputs
        }
        return cls(service, body, answer_id, outputs, text, turns)

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        async with aclosing(super()._deltas()) as arriving:
            async for delta in arriving:
                self._turns[delta.output.index].take(delta)
                yield delta

    def _num_reasoning_tokens(self, output: Output) -> int:
        return self._turns[output.index].num_reasoning_tokens

    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        index = delta.output.index
        choices: list[dict[str, Any]] = []
        if self._begins(index):
            opening = [{"role": self._role, "content": ""}, *([{"content": self._echo}] if self._echo else [])]
            choices += [{"index": index, "delta": part, "logprobs": None, **NOT_ENDED} for part in opening]
        logprobs = {**self._logprobs_of(delta), "refusal": None} if delta.logprobs else None
        turn = self._turns[index]
        new = turn.chunks()
        if not new and (logprobs is not None or turn.finish_reason or self._body.return_token_ids):
            new = [{}]
        none_yet = {"logprobs": None, **NOT_ENDED, **self._token_ids(())}
        parts: list[dict[str, Any]] = [{"index": index, "delta": part, **none_yet} for part in new]
        if parts:  # what is told once per delta
            parts[0] |= {"logprobs": logprobs, **self._token_ids(delta.token_ids)}
            parts[-1] |= {**self._end(delta), "finish_reason": turn.finish_reason}
        return [*choices, *parts]

    def _first_chunk(self) -> dict[str, Any]:
        return self._prompt_token_ids(self._outputs[0])

    def _logprobs_of(self, delta: Delta) -> Mapping[str, Sequence[Any]]:
        return {"content": chat_logprobs(self._names, delta.logprobs)}

    def _whole(self, gathered: Sequence[Gathered]) -> dict[str, Any]:
        choices = [
            {
                "index": output.index,
                "message": self._message(self._turns[output.index]),
                "logprobs": {**known.logprobs.raw(), "refusal": None} if self._with_logprobs else None,
                **self._end(known),
                "finish_reason": self._turns[output.index].finish_reason,
                **self._token_ids(known.token_ids),
                "routed_experts": None,
            }
            for output, known in zip(self._outputs, gathered, strict=True)
        ]
        first = self._outputs[0]
        of_prompt = {**self._prompt_token_ids(first), **self._prompt_logprobs(first), "prompt_text": None}
        return {**self._with_choices(choices), **of_prompt}

    def _message(self, turn: OutputTurn) -> dict[str, Any]:
        message = turn.message()
        if self._echo:
            message["content"] = self._echo + (message["content"] or "")
        return {"role": self._role, **_NOTHING_ELSE, **message}


def _content(service: Service, message: ChatMessage) -> str:
    """The text of a message."""
    return prompts.chat_template(service).content_form(message.role).text(message.model_dump()["content"] or "")


def _written(content: str, text: str) -> str:
    """A message as it is in the prompt's text: a template may trim it. As it was sent if the template rewrites it."""
    words = content.strip()
    place = text.rfind(words)
    if not words or place < 0:
        return content
    before, after = content[: content.index(words)], content[content.index(words) + len(words) :]
    has_before, has_after = text[:place].endswith(before), text[place + len(words) :].startswith(after)
    return (before if has_before else "") + words + (after if has_after else "")


def _text_and_ids(service: Service, body: ChatCompletionRequest, wanted: int) -> tuple[str, list[int]]:
    text = prompts.conversation_text(service, body.messages, body)
    prompts.check_characters(service, text, "messages", cut=body.truncate_prompt_tokens is not None)
    # The template writes special tokens itself.
    whole = prompts.encode(service, text, add_special_tokens=bool(body.add_special_tokens))
    return text, prompts.truncated(service, whole, body, wanted)
