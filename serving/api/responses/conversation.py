"""From a body of `/v1/responses` to the chat completion that the model runs: what follows is the chat's.

instructions                     a system message in front
message                          a message
reasoning                        `reasoning_content` of the assistant's message that follows
function_call                    a tool call of the assistant's message that is there, or of a new one
function_call_output             a message of the role tool
tools, tool_choice, text.format  the chat's form of them
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from model_runner import RequestError
from serving.api.schema import responses_request as sent
from serving.api.schema.errors import ApiError, validation_error
from serving.api.schema.request_models import ChatCompletionRequest
from ubatch.errors import shown

_NAMES = (
    (re.compile(r"^messages$"), "input"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^logprobs$"), "top_logprobs"),
    (re.compile(r"^tools\.(\d+)\.function"), r"tools.\1"),
)
"""The chat's fields that have another name here."""
_WORDS = (
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bresponse_format\b(\.json_schema)?"), "text.format"),
)
"""The same, in messages."""
_IN_MESSAGES = re.compile(r"messages\.(\d+)(?:\.tool_calls(?:\.(\d+))?(?:\.function)?)?")


@dataclass
class _Written:
    """A chat's message, and the fields that it is made of.

    Attributes:
        calls: fields of its tool calls.
    """

    message: dict[str, Any]
    place: str
    calls: list[str] = field(default_factory=list)


class Conversation:
    """The messages of a chat, made from a body's items one by one.

    Raises:
        ApiError: 400, a call's output comes without the call.
    """

    def __init__(self, body: sent.ResponsesRequest) -> None:
        self.written: list[_Written] = []
        self.call_ids: set[str] = set()
        if body.instructions is not None:
            self._say({"role": "system", "content": body.instructions}, "instructions")
        if isinstance(body.input, str):
            self._say({"role": "user", "content": body.input}, "input")
        else:
            for place, item in enumerate(body.input):
                self._add(item, f"input.{place}")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As `ChatCompletionRequest.messages` takes them."""
        return [each.message for each in self.written]

    def place(self, param: str) -> str:
        """The body's field that a field of the messages was made from."""
        found = _IN_MESSAGES.match(param)
        if found is None or int(found[1]) >= len(self.written):
            return param
        written, rest = self.written[int(found[1])], param[found.end() :]
        if found[2] is None or int(found[2]) >= len(written.calls):
            return written.place + rest
        return written.calls[int(found[2])] + rest

    def _say(self, message: dict[str, Any], place: str) -> _Written:
        self.written.append(_Written(message, place))
        return self.written[-1]

    def _add(self, item: sent.Item, place: str) -> None:
        match item:
            case sent.Message():
                message = {"role": item.role, "content": _content(item.content)}
                if item.role == "assistant" and (begun := self._begun("content", "tool_calls")) is not None:
                    begun.message |= message
                    begun.place = place
                else:
                    self._say(message, place)
            case sent.Reasoning():
                parts = item.content or item.summary
                message = {"role": "assistant", "reasoning_content": "\n".join(part.text for part in parts)}
                self._say(message, place)
            case sent.FunctionCall():
                begun = self._begun() or self._say({"role": "assistant"}, place)
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                begun.message.setdefault("tool_calls", []).append(call)
                begun.calls.append(place)
                self.call_ids.add(item.call_id)
            case sent.FunctionCallOutput():
                if item.call_id not in self.call_ids:
                    raise ApiError(
                        400,
                        f"{place}: No tool call found for function call output with call_id {shown(item.call_id)}. "
                        f"Nothing is stored here: send the function_call item before it.",
                        param=f"{place}.call_id",
                    )
                self._say({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}, place)

    def _begun(self, *without: str) -> _Written | None:
        """The last message if it is the assistant's and has none of these fields: more of the same turn."""
        last = self.written[-1] if self.written else None
        if last is None or last.message["role"] != "assistant" or last.message.keys() & {*without}:
            return None
        return last


def chat_body(body: sent.ResponsesRequest, conversation: Conversation) -> ChatCompletionRequest:
    """The chat completion that a body asks for.

    Raises:
        ApiError: 400, a field is not supported, or is no chat's.
    """
    if body.top_logprobs and not body.with_logprobs:
        message = "top_logprobs needs include to have 'message.output_text.logprobs'."
        raise ApiError(400, message, param="top_logprobs")
    given = {name: value for name in sent.AS_IN_CHAT if (value := getattr(body, name)) is not None}
    tools, choice = _tools(body)
    asked: dict[str, Any] = {
        "max_completion_tokens": body.max_output_tokens,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": None if body.text is None else _response_format(body.text.format),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "logprobs": True if body.with_logprobs else None,
        "top_logprobs": body.top_logprobs if body.with_logprobs else None,
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
    }
    given |= {name: value for name, value in asked.items() if value is not None}
    chat = {**given, "messages": conversation.messages}
    try:
        return ChatCompletionRequest.model_validate(chat)
    except ValidationError as error:
        raise validation_error(error.errors(), chat) from None


@contextmanager
def named_as_sent(conversation: Conversation) -> Iterator[None]:
    """Errors about a chat's fields name those of the body that it was made from."""

    def renamed(message: str, param: str | None) -> tuple[str, str | None]:
        if param is None:
            return message, None
        own = conversation.place(param)
        for pattern, name in _NAMES:
            own = pattern.sub(name, own)
        told = message if param in ("messages", "logprobs") else message.replace(param, own)
        for pattern, name in _WORDS:
            told = pattern.sub(name, told)
        return told, own

    try:
        yield
    except ApiError as error:
        message, param = renamed(error.message, error.param)
        raise ApiError(error.status, message, param=param, code=error.code) from error
    except RequestError as error:
        message, param = renamed(str(error), error.param)
        raise RequestError(message, param=param) from error


def _content(text: sent.Text) -> str | list[dict[str, str]]:
    return text if isinstance(text, str) else [{"type": "text", "text": part.text} for part in text]


def _tools(body: sent.ResponsesRequest) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """The chat's tools and the choice among them. Tools that are not allowed are left out."""
    tools: Sequence[sent.FunctionTool] = body.tools or ()
    choice: Any = body.tool_choice
    match choice:
        case sent.AllowedTools():
            names = {each.name for each in choice.tools}
            if unknown := names - {tool.name for tool in tools}:
                message = f"tool_choice allows {', '.join(map(repr, sorted(unknown)))}, which tools does not have."
                raise ApiError(400, message, param="tool_choice")
            tools, choice = [tool for tool in tools if tool.name in names], choice.mode
        case sent.ChosenFunction():
            choice = {"type": "function", "function": {"name": choice.name}}
    return [_tool(tool) for tool in tools] or None, choice


def _tool(tool: sent.FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _response_format(form: sent.TextFormat | None) -> dict[str, Any] | None:
    if isinstance(form, sent.JsonSchemaForm):
        schema = form.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": "json_schema", "json_schema": schema}
    return None if form is None else {"type": form.type}
