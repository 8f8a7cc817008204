"""Parsers of turns by name (vLLM's), and what a request's turn is read with."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from serving.turns.formats import (
    deepseek,
    forced,
    glm45,
    granite,
    harmony,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
    qwen3_coder,
)
from serving.turns.marked import MakeId, MarkedTurn
from serving.turns.reading import Reading
from serving.turns.reasoning import Before, ReasoningFormat
from serving.turns.turn import PlainTurn, TurnParser

Schemas = Mapping[str, Mapping[str, Any]]


def _random_id(name: str, place: int) -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class CallFormat:
    """How a family writes tool calls.

    Attributes:
        read: reads content and calls.
        marks: what marks them; where one is a special token, the parser must see its text.
        make_id: makes ids of calls that have none.
    """

    read: Callable[[MarkedTurn], Reading[None]]
    marks: tuple[str, ...]
    make_id: MakeId = _random_id


NOTHING = Before()
HARMONY = "openai"
TOOL_PARSERS: Mapping[str, CallFormat] = {
    "deepseek_v3": CallFormat(deepseek.read_v3, deepseek.MARKS),
    "deepseek_v31": CallFormat(deepseek.read_v31, deepseek.MARKS),
    "glm45": CallFormat(glm45.read, glm45.MARKS),
    "granite": CallFormat(granite.read, granite.MARKS),
    "hermes": CallFormat(hermes.read, hermes.MARKS),
    "kimi_k2": CallFormat(kimi_k2.read, kimi_k2.MARKS, kimi_k2.make_id),
    "llama3_json": CallFormat(llama3_json.read, llama3_json.MARKS),
    "mistral": CallFormat(mistral.read, mistral.MARKS, mistral.make_id),
    HARMONY: CallFormat(harmony.read, harmony.MARKS),
    "qwen3_coder": CallFormat(qwen3_coder.read, qwen3_coder.MARKS),
}
"""Name -> format of tool calls."""
HARMONY_REASONING = "openai_gptoss"
REASONING_PARSERS: Mapping[str, ReasoningFormat | None] = {
    "deepseek_r1": ReasoningFormat(assumed=True),
    "glm45": ReasoningFormat(),
    HARMONY_REASONING: None,
    "qwen3": ReasoningFormat(),
}
"""Name -> format of reasoning; None for harmony's, whose messages are read as one."""


@dataclass(frozen=True)
class TurnSettings:
    """What a server's turns are read with.

    Attributes:
        enable_auto_tool_choice: the model may decide to call tools.
        tool_call_parser: a name of `TOOL_PARSERS`; None for none.
        reasoning_parser: a name of `REASONING_PARSERS`; None for none.
        exclude_tools_when_tool_choice_none: the prompt has no tools that may not be called.
    """

    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = False

    @property
    def harmony(self) -> bool:
        """Whether turns have harmony's messages, which are read as one whatever a request asks for."""
        return self.tool_call_parser == HARMONY or self.reasoning_parser == HARMONY_REASONING

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of reasoning; None where there is none, or it is harmony's."""
        return None if self.reasoning_parser is None else REASONING_PARSERS[self.reasoning_parser]


@dataclass(frozen=True)
class TurnPlan:
    """How a request's turns are read.

    Attributes:
        tools: the schema of each function's parameters, by the function's name; empty if none may be called.
        forced: the call's function if it is named, True if there must be one, False if the model may decide.
        parallel: several calls may be made.
        reasoning: reasoning is separated.
        num_calls: calls in the conversation so far.
    """

    tools: Schemas
    forced: str | bool = False
    parallel: bool = True
    reasoning: bool = True
    num_calls: int = 0


def marks_of(settings: TurnSettings, plan: TurnPlan) -> frozenset[str]:
    """The marks that the parser of such a turn reads; those that are special tokens must be in its text."""
    calls, reasoning = _formats(settings, plan)
    return frozenset((*(calls.marks if calls else ()), *(reasoning.marks if reasoning else ())))


def make_turn_parser(
    settings: TurnSettings,
    plan: TurnPlan,
    *,
    before: Before = NOTHING,
    streamed: bool = True,
    hidden: Collection[str] = (),
) -> TurnParser:
    """What reads one output's text.

    Args:
        settings: the server's.
        plan: the request's.
        before: what comes before the turn.
        streamed: pass calls on before they are complete.
        hidden: marks that are special tokens, which content should not have.
    """
    calls, reasoning = _formats(settings, plan)
    if calls is None and reasoning is None:
        return PlainTurn()

    def read(turn: MarkedTurn) -> Reading[None]:
        if reasoning is not None:
            yield from reasoning.read(turn, before)
        if calls is not None:
            yield from calls.read(turn)
        else:
            yield from turn.prose((), turn.content)

    make_id = _random_id if calls is None else calls.make_id
    return MarkedTurn(
        read,
        make_id=lambda name, place: make_id(name, plan.num_calls + place),
        tools=plan.tools,
        streamed=streamed,
        most_calls=None if plan.parallel else 1,
        hidden=hidden,
    )


def _formats(settings: TurnSettings, plan: TurnPlan) -> tuple[CallFormat | None, ReasoningFormat | None]:
    if settings.harmony:
        return TOOL_PARSERS[HARMONY], None
    named = settings.tool_call_parser
    own = None if named is None else TOOL_PARSERS[named]
    reasoning = settings.reasoning if plan.reasoning or plan.forced else None
    make_id = _random_id if own is None else own.make_id
    if plan.forced:
        read = forced.read_required if plan.forced is True else partial(forced.read_named, name=str(plan.forced))
        return CallFormat(read, (), make_id), reasoning
    return (own if plan.tools and settings.enable_auto_tool_choice else None), reasoning
