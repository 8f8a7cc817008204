"""The flags of tool calls and reasoning."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from serving.arguments.fields import Flag, Group
from serving.options.flags.fields import one_of
from serving.turns.parsers import REASONING_PARSERS, TOOL_PARSERS


class Turns(Group):
    """Tool calls and reasoning in the answers of chats."""

    enable_auto_tool_choice: bool = Field(
        False, description="the model decides whether to call tools, where a request leaves it to it (tool_choice auto)"
    )
    tool_call_parser: Annotated[
        str | None, one_of(TOOL_PARSERS), Flag(default="with --enable-auto-tool-choice, what the chat template shows")
    ] = Field(None, description=f"the form of the model's calls: {', '.join(TOOL_PARSERS)}")
    reasoning_parser: Annotated[
        str | None, one_of(REASONING_PARSERS), Flag(default="none; openai_gptoss where the chat template is harmony's")
    ] = Field(None, description=f"separate reasoning from content: {', '.join(REASONING_PARSERS)}")
    exclude_tools_when_tool_choice_none: bool = Field(
        False, description="do not show tools to the model where it may not call them (tool_choice none)"
    )
