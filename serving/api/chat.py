"""`/v1/chat/completions`: answers conversations."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from serving.api.allowed_tokens import allowed_tokens
from serving.api.answer import Answer, Gathered, check_common, check_logprobs, check_outputs
from serving.api.generation import Delta, Output, make_outputs
from serving.api.logprobs import chat_logprobs
from serving.api.prompts import (
    chat_template,
    check_characters,
    check_conversation,
    check_length,
    conversation_text,
    counted_characters,
    encode,
    truncated,
)
from serving.api.sampling import sampling_params
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import ChatCompletionRequest
from serving.api.service import Service
from serving.api.structured import output_grammar


class ChatAnswer(Answer):
    """A chat completion while it is generated; made by `make`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    lists = ("content",)

    def __init__(
        self, service: Service, body: ChatCompletionRequest, answer_id: str, outputs: Sequence[Output], text: str
    ) -> None:
        super().__init__(service, body, answer_id, outputs)
        self._with_logprobs = bool(body.logprobs)
        # If the prompt does not begin the assistant's turn, the answer continues the last message, in its role.
        last = body.messages[-1]
        self._role = "assistant" if body.begins_turn else last.role
        self._echo = ""
        if body.echo and last.role == self._role:
            form = chat_template(service).content_form(last.role)
            self._echo = _written(form.text(last.model_dump()["content"] or ""), text)

    @classmethod
    async def make(cls, service: Service, body: ChatCompletionRequest, size: int) -> ChatAnswer:
        """Make the answer of a request whose body has `size` bytes.

        Raises:
            RequestError, ApiError, QueueFull: the request cannot be served.
        """
        _refuse(body)
        check_outputs(service, 1, body.n)
        limits = await allowed_tokens(service, body, 1, size)
        limits = replace(limits, grammar=await output_grammar(service, body))
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        text, token_ids = await service.long_work.run(lambda: _text_and_ids(service, body, wanted or 1), size)
        if not token_ids:
            raise ApiError(400, "The messages have no tokens; there is nothing to answer.", param="messages")
        asked = {"max_tokens": body.max_tokens, "max_completion_tokens": body.max_completion_tokens}
        left = check_length(service, len(token_ids), asked, "messages")
        params = sampling_params(
            service,
            body,
            max_tokens=service.default_max_tokens(left, left) if wanted is None else wanted,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            limits=limits,
        )
        of_prompt = 0 if body.prompt_logprobs is None else len(token_ids) * (body.prompt_logprobs + 1)
        check_logprobs(of_prompt, params, body)
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        return cls(service, body, answer_id, make_outputs(service, body, answer_id, [(token_ids, params)]), text)

    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        index = delta.output.index
        choices: list[dict[str, Any]] = []
        if self._begins(index):
            opening = [{"role": self._role, "content": ""}, *([{"content": self._echo}] if self._echo else [])]
            choices += [{"index": index, "delta": part, "logprobs": None, "finish_reason": None} for part in opening]
        logprobs = {**self._logprobs_of(delta), "refusal": None} if delta.logprobs else None
        token_ids = self._token_ids(delta.token_ids)
        if delta.text or logprobs is not None or delta.finish_reason or token_ids:
            new = {"content": delta.text} if delta.text else {}
            choice = {"index": index, "delta": new, "logprobs": logprobs, "finish_reason": delta.finish_reason}
            choices.append({**choice, **token_ids})
        return choices

    def _first_chunk(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._outputs[0].request.token_ids)} if self._body.return_token_ids else {}

    def _logprobs_of(self, delta: Delta) -> Mapping[str, Sequence[Any]]:
        return {"content": chat_logprobs(self._names, delta.logprobs)}

    def _whole(self, gathered: Sequence[Gathered]) -> dict[str, Any]:
        choices = [
            {
                "index": output.index,
                "message": {"role": self._role, "content": "".join((self._echo, *known.text)), "refusal": None},
                "logprobs": {**known.logprobs.raw(), "refusal": None} if self._with_logprobs else None,
                "finish_reason": known.finish_reason,
                **self._token_ids(known.token_ids),
            }
            for output, known in zip(self._outputs, gathered, strict=True)
        ]
        about = {**self._about, "object": self.kind, **self._of_prompt(self._outputs[0])}
        return {**about, "choices": choices, "usage": self._usage()}


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
    text = conversation_text(service, body.messages, body)
    check_characters(service, text, "messages", at_least=counted_characters(body))
    # The template writes special tokens itself.
    whole = encode(service, text, add_special_tokens=bool(body.add_special_tokens))
    return text, truncated(service, whole, body, wanted)


def _refuse(body: ChatCompletionRequest) -> None:
    """Refuse fields that contradict each other."""
    check_common(body)
    check_conversation(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
