"""A response of `/v1/responses` while it is generated: a chat's deltas, written as items and events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

import msgspec

from serving.api.chat import ChatAnswer
from serving.api.generation import Delta
from serving.api.logprobs import JsonLists, chat_logprobs
from serving.api.responses.conversation import Conversation, chat_body, named_as_sent
from serving.api.schema.errors import ApiError, as_api_error
from serving.api.schema.request_models import ChatCompletionRequest
from serving.api.schema.responses_request import ResponsesRequest
from serving.api.service import Service
from serving.api.sse import named_event
from serving.turns.marked import ToolCallDelta, TurnDelta

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
            conversation = Conversation(body)
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


Event = dict[str, Any]
_LOGPROBS = "logprobs"
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass
class _Open:
    """The item that text is being added to.

    Attributes:
        call: the call's place among the turn's calls; None for text.
    """

    item: dict[str, Any]
    text: list[str] = field(default_factory=list)
    logprobs: JsonLists = field(default_factory=lambda: JsonLists([_LOGPROBS]))
    call: int | None = None

    def part(self) -> dict[str, Any]:
        """The text so far, as the item has it: a part of its content, or the call's arguments."""
        text = "".join(self.text)
        if self.item["type"] == "function_call":
            return {"arguments": text}
        if self.item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], **self.logprobs.raw()}


class OutputItems:
    """The items of one response, and the events by which they come to be.

        reasoning      added, its part added, text deltas, text done, part done, item done
        message        the same, with the text that the user reads
        function_call  added, deltas of the arguments, arguments done, item done

    One item is open at a time: another kind of text, or the next call, ends it. An output without any text is one empty
    message.

    Args:
        identity: ends the items' ids, which are unique with it.

    Attributes:
        items: what has been added so far; those but the last one are complete.
    """

    def __init__(self, identity: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._identity = identity
        self._open: _Open | None = None
        self._unread: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is held back

    def take(self, turn: TurnDelta, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """The events of a turn's next part, read from tokens with these log-probabilities, in the chat's form."""
        self._unread += logprobs
        if turn.reasoning:
            own = yield from self._opened("reasoning", {"summary": [], "content": []})
            yield self._add(own, turn.reasoning, "response.reasoning_text.delta", content_index=0)
        if turn.content:
            yield from self._add_content(turn.content)
        for call in turn.tool_calls:
            yield from self._add_call(call)
        if turn.reasoning or turn.content or turn.tool_calls:
            self._unread = []

    def finish(self, *, complete: bool) -> Iterator[Event]:
        """The last events; `complete` is false if the output was cut."""
        if not self.items or (self._unread and self.items[-1]["type"] == "message"):
            yield from self._add_content("")  # tokens without a text, such as the end of sequence
        yield from self._end("completed" if complete else "incomplete")

    def _add_content(self, text: str) -> Iterator[Event]:
        own = yield from self._opened("message", {"role": "assistant", "content": []})
        own.logprobs.add({_LOGPROBS: self._unread})
        told = [_told(entry) for entry in self._unread]
        self._unread = []
        if text or told:
            yield self._add(own, text, "response.output_text.delta", content_index=0, logprobs=told)

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        call_id = call.id or f"call_{self._identity}_{call.index}"
        about = {"call_id": call_id, "name": call.name or "", "arguments": ""}
        own = yield from self._opened("function_call", about, call=call.index)
        if call.arguments:
            yield self._add(own, call.arguments, "response.function_call_arguments.delta")

    def _add(self, own: _Open, text: str, name: str, **more: Any) -> Event:
        own.text.append(text)
        return {"type": name, **self._place(), **more, "delta": text}

    def _opened(self, kind: str, about: Mapping[str, Any], call: int | None = None) -> Generator[Event, None, _Open]:
        """The open item if it is of this kind; otherwise a new one, and the events that begin it."""
        own = self._open
        if own is not None and (own.item["type"], own.call) == (kind, call):
            return own
        yield from self._end("completed")
        item = {"id": f"{_PREFIXES[kind]}_{self._identity}_{len(self.items)}", "type": kind, "status": "in_progress"}
        self.items.append({**item, **about})
        own = self._open = _Open(self.items[-1], call=call)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(own.item)}
        if kind != "function_call":
            yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": own.part()}
        return own

    def _end(self, status: str) -> Iterator[Event]:
        """Complete the open item, if there is one."""
        own = self._open
        if own is None:
            return
        self._open = None
        place, part = self._place(), own.part()
        if own.item["type"] == "function_call":
            own.item |= part
            yield {"type": "response.function_call_arguments.done", **place, "name": own.item["name"], **part}
        else:
            own.item["content"] = [part]
            place["content_index"] = 0
            said = {name: part[name] for name in ("text", _LOGPROBS) if name in part}
            name = "output_text" if own.item["type"] == "message" else "reasoning_text"
            yield {"type": f"response.{name}.done", **place, **said}
            yield {"type": "response.content_part.done", **place, "part": part}
        own.item["status"] = status
        yield {"type": "response.output_item.done", "output_index": place["output_index"], "item": own.item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _told(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A token's log-probabilities as deltas have them: without bytes."""
    top = [{"token": other["token"], "logprob": other["logprob"]} for other in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}
