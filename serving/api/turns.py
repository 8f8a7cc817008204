"""From a request's tools to how its turns are read, and to the form of forced calls; turns while they are generated.

A turn is an output's text, read as content, reasoning and tool calls.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from model_runner import FinishReason, RequestError
from serving.api.generation import Delta
from serving.api.prompts import REASONING
from serving.api.sampling import output_grammar
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import ChatCompletionRequest, ChatMessage, NamedToolChoice, Tool
from serving.api.service import Service
from serving.structured import After, Messages, Preamble, StructuredOutputsParams
from serving.text.tokenizer import Vocabulary
from serving.turns.marked import ToolCallDelta, TurnDelta, TurnParser
from serving.turns.parsers import Before, TurnPlan, TurnSettings, marks_of
from ubatch.errors import shown

_LITERAL = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are no schemas."""
_IN_CALLS = re.compile(r"items\.anyOf\.(\d+)\.properties\.parameters[.:]\s*")
"""Where the schema of all calls has a tool's parameters."""
_TOOL_CALLS = "tool_calls"
"""The finish reason of an output that ended with calls."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def turn_plan(service: Service, body: ChatCompletionRequest) -> TurnPlan:
    """How the turns of a request are read. Without a choice, tools may be called.

    Raises:
        ApiError: 400, the tools or the choice cannot be served.
    """
    tools = body.tools or ()
    _check_tools(tools)
    schemas = {each.function.name: each.function.parameters or {} for each in tools}
    choice = body.tool_choice or ("auto" if tools else "none")
    forced: str | bool = choice == "required"
    if isinstance(choice, NamedToolChoice):
        forced = choice.function.name
    if forced and not tools:
        raise ApiError(400, "tool_choice asks for a call, and there are no tools to call.", param="tool_choice")
    if isinstance(forced, str) and forced not in schemas:
        message = f"tool_choice names the function {shown(forced)}, which is not among the tools."
        raise ApiError(400, message, param="tool_choice")
    if choice == "auto" and tools and not service.turns.enable_auto_tool_choice:
        message = (
            "tool_choice auto needs a server with --enable-auto-tool-choice and --tool-call-parser. Start it with "
            "these flags, or set tool_choice to 'none', 'required' or a function."
        )
        raise ApiError(400, message, param="tool_choice")
    return TurnPlan(
        {} if choice == "none" else schemas,
        forced,
        parallel=body.parallel_tool_calls is not False,
        reasoning=body.separate_reasoning is not False,
        num_calls=_num_calls(body.messages),
    )


def _forced_form(tools: Sequence[Tool], plan: TurnPlan) -> StructuredOutputsParams | None:
    """The form of an output that must be calls: see `serving.turns.formats.as_json`. None if none is forced.

    Objects have the properties that they list, unless their schema says otherwise: others are no parameters.
    """
    if not plan.forced:
        return None
    schemas = {each.function.name: each.function.parameters or _NO_PARAMETERS for each in tools}
    if isinstance(plan.forced, str):
        return StructuredOutputsParams(json=schemas[plan.forced], disable_additional_properties=True)
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for place, (name, schema) in enumerate(schemas.items()):
        own = _referring(schema, f"#/$defs/tool{place}")
        if own != schema:
            definitions[f"tool{place}"] = own
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": own}
        calls.append({"type": "object", "properties": properties, "required": ["name", "parameters"]})
    form: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not plan.parallel:
        form["maxItems"] = 1
    whole = {**form, **({"$defs": definitions} if definitions else {})}
    return StructuredOutputsParams(json=whole, disable_additional_properties=True)


async def turn_grammar(service: Service, body: ChatCompletionRequest, plan: TurnPlan, before: Before) -> str | None:
    """The grammar of a turn: of the form that the request asks for, or of calls that are forced, after the reasoning.

    Raises:
        RequestError, ApiError, QueueFull: see `output_grammar`. Errors about the form of forced calls name the tool
            whose parameters are at fault, if they say where.
    """
    tools = body.tools or ()
    try:
        forced = _forced_form(tools, plan)
        return await output_grammar(service, body, forced=forced, after=_preamble(service.turns, before))
    except RequestError as error:
        place, rest = None, str(error).removeprefix("tools: ")
        if isinstance(plan.forced, str):
            place = next(number for number, each in enumerate(tools) if each.function.name == plan.forced)
        elif plan.forced and (found := _IN_CALLS.match(rest)) is not None:
            place, rest = int(found[1]), rest[found.end() :]
        if error.param != "tools" or place is None:
            raise
        param = f"tools.{place}.function.parameters"
        raise RequestError(f"{param}: {rest}", param=param) from error


def _referring(schema: Any, root: str) -> Any:
    """A schema that is part of a larger one: its references to itself begin at `root`."""
    match schema:
        case Mapping():
            return {
                key: root + value[1:]
                if key == "$ref" and isinstance(value, str) and value[:1] == "#"
                else value
                if key in _LITERAL
                else _referring(value, root)
                for key, value in schema.items()
            }
        case list():
            return [_referring(each, root) for each in schema]
        case _:
            return schema


def _check_tools(tools: Sequence[Tool]) -> None:
    for place, tool in enumerate(tools):
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            param = f"tools.{place}.function.parameters"
            raise ApiError(400, f"{param}: its type should be object, not {shown(kind)}.", param=param)
    name, count = next(iter(Counter(each.function.name for each in tools).most_common(1)), ("", 1))
    if count > 1:
        raise ApiError(400, f"{count} tools have the name {shown(name)}; give each its own.", param="tools")


def _num_calls(messages: Sequence[ChatMessage]) -> int:
    """Calls in a conversation."""
    found = [(message.model_extra or {}).get("tool_calls") for message in messages]
    return sum(len(calls) for calls in found if isinstance(calls, list))


@dataclass
class OutputTurn:
    """One output's turn.

    Attributes:
        named: the request names the call: then OpenAI's finish reason is not `tool_calls`.
        streamed: the parts are sent as they come, and not kept.
        with_reasoning: the client gets the reasoning.
        new: what the last delta has brought.
        parts: all that was kept.
        finish_reason: why the turn has ended; None before.
        num_reasoning_tokens: tokens of the reasoning, without its marks.
    """

    parser: TurnParser
    named: bool
    streamed: bool
    with_reasoning: bool
    new: TurnDelta = field(default_factory=TurnDelta)
    parts: list[TurnDelta] = field(default_factory=list)
    finish_reason: str | None = None
    num_reasoning_tokens: int = 0

    def take(self, delta: Delta) -> None:
        """Read the output's next text."""
        reasoned, parser = self.parser.reasons, self.parser
        new = parser.take(delta.text)
        if reasoned and parser.reasons:
            self.num_reasoning_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            new = _together((new, parser.finish()))
            stopped = delta.finish_reason == FinishReason.STOP.value
            self.finish_reason = _TOOL_CALLS if stopped and parser.num_calls and not self.named else delta.finish_reason
        self.new = new
        if not self.streamed:
            self.parts.append(new)

    def message(self) -> dict[str, Any]:
        """The parts of a whole answer's message; null content beside calls, or where all is reasoning."""
        turn = _together(self.parts)
        message: dict[str, Any] = {"content": turn.content}
        if not turn.content and (turn.tool_calls or turn.reasoning):
            message["content"] = None
        message |= self._reasoning(turn)
        if turn.tool_calls:
            calls: dict[int, dict[str, Any]] = {}
            for part in turn.tool_calls:
                call = calls.setdefault(part.index, _call(part))
                call["function"]["arguments"] += part.arguments
            message["tool_calls"] = [*calls.values()]
        return message

    def chunks(self) -> list[dict[str, Any]]:
        """The deltas of a stream's events: one of reasoning and content, then one for each part of a call."""
        chunks: list[dict[str, Any]] = []
        said = self._reasoning(self.new)
        if self.new.content:
            said["content"] = self.new.content
        if said:
            chunks.append(said)
        for part in self.new.tool_calls:
            call = {"function": {"arguments": part.arguments}} if part.name is None else _call(part)
            chunks.append({"tool_calls": [{"index": part.index, **call}]})
        return chunks

    def _reasoning(self, turn: TurnDelta) -> dict[str, str]:
        return dict.fromkeys(REASONING, turn.reasoning) if turn.reasoning and self.with_reasoning else {}


def hidden_marks(service: Service, body: ChatCompletionRequest, plan: TurnPlan) -> Mapping[str, int]:
    """The parser's marks that are special tokens, with their ids, where a client should not see such tokens."""
    if body.skip_special_tokens is False:
        return {}
    vocabulary = Vocabulary.of(service.tokenizer)
    ids = {mark: vocabulary.special_id(mark) for mark in sorted(marks_of(service.turns, plan))}
    return {mark: token for mark, token in ids.items() if token is not None}


def _preamble(settings: TurnSettings, before: Before) -> After | None:
    """The reasoning that may come before an answer's own form; None where there is none."""
    if settings.harmony:
        return Messages()
    reasoning = settings.reasoning
    if reasoning is None or reasoning.is_over(before):
        return None
    return Preamble(reasoning.begin, reasoning.end, reasoning.has_begun(before))


def _call(first: ToolCallDelta) -> dict[str, Any]:
    """A call that begins, from its first part."""
    return {"id": first.id, "type": "function", "function": {"name": first.name, "arguments": ""}}


def _together(parts: Sequence[TurnDelta]) -> TurnDelta:
    return TurnDelta(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.tool_calls),
    )
