"""`/v1/chat/completions`: conversations, answered."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from serving.api.answer import Answer, check_common, check_outputs
from serving.api.errors import ApiError, shown
from serving.api.generation import Delta, Output, make_outputs
from serving.api.logprobs import chat_logprobs
from serving.api.prompts import check_characters, check_length, conversation_text, encode
from serving.api.request_models import ChatCompletionRequest
from serving.api.response_models import ChatCompletion
from serving.api.sampling import sampling_params
from serving.api.service import Service
from serving.api.token_limits import token_limits
from serving.text import Vocabulary

__all__ = ["ChatAnswer"]


class ChatAnswer(Answer):
    """A chat completion in the making; see `make`."""

    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, service: Service, body: ChatCompletionRequest, answer_id: str, outputs: Sequence[Output]
    ) -> None:
        super().__init__(service, body, answer_id, outputs)
        self._vocabulary = Vocabulary.of(service.tokenizer) if body.logprobs else None
        self._begun: set[int] = set()  # outputs whose role was told

    @classmethod
    async def make(cls, service: Service, body: ChatCompletionRequest, size: int) -> ChatAnswer:
        """From a request, and how many bytes it has.

        Raises:
            RequestError, ApiError, QueueFull: it cannot be served.
        """
        _refuse(body)
        check_outputs(service, 1, body.n)
        limits = await token_limits(service, body, 1, size)
        token_ids = await service.long_work.run(lambda: _token_ids(service, body), size)
        if not token_ids:
            raise ApiError(400, "The messages have no tokens; there is nothing to answer.", param="messages")
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        left = check_length(service, len(token_ids), wanted, "messages")
        params = sampling_params(
            body,
            service.defaults,
            max_tokens=left if wanted is None else wanted,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            limits=limits,
            vocab_size=service.engine.info.vocab_size,
        )
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        return cls(service, body, answer_id, make_outputs(service, body, answer_id, [(token_ids, params)]))

    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        index = delta.output.index
        choices: list[dict[str, Any]] = []
        if index not in self._begun:
            self._begun.add(index)
            opening = {"role": "assistant", "content": ""}
            choices.append({"index": index, "delta": opening, "logprobs": None, "finish_reason": None})
        logprobs = self._logprobs(delta)
        if delta.text or logprobs is not None or delta.finish_reason:
            new = {"content": delta.text} if delta.text else {}
            choice = {"index": index, "delta": new, "logprobs": logprobs, "finish_reason": delta.finish_reason}
            choices.append(choice)
        return choices

    def _whole(self, deltas: Sequence[Sequence[Delta]]) -> ChatCompletion:
        choices: list[dict[str, Any]] = []
        for output, of_output in zip(self._outputs, deltas, strict=True):
            parts = [self._logprobs(delta) for delta in of_output]
            content = [entry for part in parts if part is not None for entry in part["content"]]
            choices.append(
                {
                    "index": output.index,
                    "message": {"content": "".join(delta.text for delta in of_output)},
                    "logprobs": {"content": content} if self._vocabulary is not None else None,
                    "finish_reason": of_output[-1].finish_reason,
                }
            )
        return ChatCompletion.model_validate({**self._about, "choices": choices, "usage": self._usage()})

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._vocabulary is None or not delta.logprobs:
            return None
        return chat_logprobs(self._vocabulary, delta.logprobs)


def _token_ids(service: Service, body: ChatCompletionRequest) -> list[int]:
    text = conversation_text(
        service,
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        template_options=body.chat_template_kwargs or {},
    )
    check_characters(service, text, "messages")
    # The template writes special tokens itself.
    return encode(service, text, add_special_tokens=bool(body.add_special_tokens))


def _refuse(body: ChatCompletionRequest) -> None:
    """Refuse what is not supported, and what contradicts itself."""
    check_common(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    if body.response_format is not None and body.response_format.type != "text":
        message = f"response_format {shown(body.response_format.type)} is not supported; only 'text' is."
        raise ApiError(400, message, param="response_format")
    if body.tools and body.tool_choice != "none":
        raise ApiError(400, "tools are not supported; leave them out, or set tool_choice to 'none'.", param="tools")
    if body.tool_choice not in (None, "none", "auto"):
        message = f"tool_choice {shown(body.tool_choice)} is not supported; only 'none' is."
        raise ApiError(400, message, param="tool_choice")
