"""From a request's tools to how its turns are read, and to the form of calls that are forced."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from model_runner import RequestError
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import ChatCompletionRequest, ChatMessage
from serving.api.schema.tool_models import NamedToolChoice, Tool
from serving.api.service import Service
from serving.structured import StructuredOutputsParams
from serving.turns import TurnPlan
from ubatch.errors import shown

_LITERAL = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are no schemas."""
_IN_CALLS = re.compile(r"items\.anyOf\.(\d+)\.properties\.parameters[.:]\s*")
"""Where the schema of all calls has a tool's parameters."""
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


def forced_form(tools: Sequence[Tool], plan: TurnPlan) -> StructuredOutputsParams | None:
    """The form of an output that must be calls: see `serving.turns.formats.forced`. None if none is forced.

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


@contextmanager
def named_tool(tools: Sequence[Tool], plan: TurnPlan) -> Iterator[None]:
    """Errors about the form of forced calls name the tool whose parameters are at fault, if they say where."""
    try:
        yield
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
