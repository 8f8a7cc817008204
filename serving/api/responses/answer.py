"""A response of `/v1/responses` while it is generated: a chat's deltas, written as items and events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import count
from typing import Any, Self

import msgspec

from serving.api.chat import ChatAnswer
from serving.api.generation import Delta
from serving.api.logprobs import chat_logprobs
from serving.api.responses.conversation import Conversation, chat_body, named_as_sent
from serving.api.responses.items import Event, OutputItems
from serving.api.schema.errors import ApiError, as_api_error
from serving.api.schema.request_models import ChatCompletionRequest
from serving.api.schema.responses_request import ResponsesRequest
from serving.api.service import Service
from serving.api.sse import named_event

_INCOMPLETE = {"length": "max_output_tokens"}
"""The chat's finish reason -> why a response is incomplete."""


class ResponsesAnswer(ChatAnswer):
    """A response; made by `respond`. It has one output."""

    id_prefix = "resp_"
    done = b""  # the last event says how the response ended
    keeps_logprobs = True

    asked: ResponsesRequest

    @classmethod
    async def respond(cls, service: Service, body: ResponsesRequest, size: int) -> Self:
        """Make the response to a body of `size` bytes.

        Raises:
            RequestError, ApiError, QueueFull: the request cannot be served.
        """

        def as_chat() -> tuple[Conversation, ChatCompletionRequest]:
            conversation = Conversation.of(body)
            with named_as_sent(conversation):
                return conversation, chat_body(body, conversation)

        conversation, chat = await service.long_work.run(as_chat, size)
        with named_as_sent(conversation):
            answer = await cls.make(service, chat, size)
        answer.asked = body
        return answer

    async def collect(self) -> bytes:
        """The whole response, as JSON."""
        output = self._output_items()
        async with aclosing(self._deltas()) as arriving:
            async for delta in arriving:
                for _ in self._take(output, delta):
                    pass
        # As for chats: encoding may take long, and is not dropped on shutdown.
        return await asyncio.to_thread(lambda: msgspec.json.encode(self._response(output)))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response's events, with their names. They begin with the first delta: an earlier error has a status."""
        numbers, output = count(), self._output_items()

        def numbered(kind: str, /, **event: Any) -> bytes:
            return named_event(kind, {"type": kind, **event, "sequence_number": next(numbers)})

        begun, error = False, None
        try:
            async with aclosing(self._deltas()) as arriving:
                async for delta in arriving:
                    if not begun:
                        for name in ("response.created", "response.in_progress"):
                            yield numbered(name, response=self._begun_response())
                    begun = True
                    for event in self._take(output, delta):
                        yield numbered(event.pop("type"), **event)
        except Exception as raised:
            if not begun:
                raise
            error = as_api_error(raised)
            yield numbered("error", code=error.code, message=error.message, param=error.param)
            for _ in output.finish(complete=False):  # the response has the item as it is
                pass
        response = self._response(output, error)
        yield numbered(f"response.{response['status']}", response=response)

    def _output_items(self) -> OutputItems:
        return OutputItems(self._about["id"].removeprefix(self.id_prefix))

    def _take(self, output: OutputItems, delta: Delta) -> Iterator[Event]:
        """Add a delta, which the turn has read, to the output; yields the events."""
        turn = self._turns[delta.output.index]
        yield from output.take(turn.new, chat_logprobs(self._names, delta.logprobs) if delta.logprobs else ())
        if turn.finish_reason is not None:
            yield from output.finish(complete=turn.finish_reason not in _INCOMPLETE)

    def _begun_response(self) -> dict[str, Any]:
        return {**self._settings(), "status": "in_progress", "output": [], "usage": None}

    def _response(self, output: OutputItems, error: ApiError | None = None) -> dict[str, Any]:
        """The response as it ends."""
        ended: dict[str, Any] = {"status": "completed", "completed_at": int(time.time())}
        if error is not None:
            code = "server_error" if error.status >= 500 else "invalid_prompt"
            ended = {"status": "failed", "error": {"code": code, "message": error.message}}
        elif (why := _INCOMPLETE.get(self._turns[0].finish_reason or "")) is not None:
            ended = {"status": "incomplete", "incomplete_details": {"reason": why}}
        return {**self._settings(), **ended, "output": output.items, "usage": self._responses_usage()}

    def _settings(self) -> dict[str, Any]:
        """What the response says of the request, with the values that count where it gave none."""
        asked, params = self.asked, self._outputs[0].request.params
        given = asked.model_dump(
            include={"tools", "tool_choice", "text", "reasoning"}, by_alias=True, exclude_none=True, warnings=False
        )
        reasoning = given.get("reasoning", {})
        return {
            "id": self._about["id"],
            "object": "response",
            "created_at": self._about["created"],
            "model": self._about["model"],
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium", **given.get("text", {})},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": asked.truncation or "disabled",
        }

    def _responses_usage(self) -> dict[str, Any]:
        usage = self._usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }
