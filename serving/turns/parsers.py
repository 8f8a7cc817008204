"""Parsers of turns by name (vLLM's), what a request's turn is read with, and which a model's chat template shows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from serving.turns.formats import as_json, in_sections, tagged
from serving.turns.formats.harmony import CHANNEL, OPENAI
from serving.turns.marked import CallFormat, MarkedTurn, TurnParser, random_id
from serving.turns.reading import Reading
from ubatch import ConfigError


@dataclass(frozen=True)
class Before:
    """What comes before a turn: it says whether the reasoning has begun, or is over.

    Attributes:
        prompt: the prompt's text, of which the end counts.
        continued: the message that the turn continues; None if it begins one.
    """

    prompt: str = ""
    continued: str | None = None


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family marks its reasoning.

    Attributes:
        begin: the mark before it, which the prompt may end with.
        end: the mark behind it.
        assumed: the turn begins within the reasoning, unless the prompt ends it.
    """

    begin: str = "<think>"
    end: str = "</think>"
    assumed: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks."""
        return self.begin, self.end

    def has_begun(self, before: Before) -> bool:
        """Whether the turn begins within the reasoning."""
        if before.continued is not None:
            return before.continued.rfind(self.begin) > before.continued.rfind(self.end)
        prompt = before.prompt.rstrip()
        return prompt.endswith(self.begin) or (self.assumed and not prompt.endswith(self.end))

    def is_over(self, before: Before) -> bool:
        """Whether the turn begins behind the reasoning."""
        ended = before.continued is not None or before.prompt.rstrip().endswith(self.end)
        return ended and not self.has_begun(before)

    def read(self, turn: MarkedTurn, before: Before) -> Reading[None]:
        """Read the reasoning, if the turn begins with it. Without its end, all of the turn is reasoning."""
        begun = turn.reasons = self.has_begun(before)
        if self.is_over(before):
            return
        space = yield from turn.text.space()
        marked = (yield from turn.text.one_of(self.begin)) is not None
        if not marked and not begun:
            turn.content(space)
            return
        if not marked:
            turn.reasoning(space)
        turn.reasons = True
        yield from turn.prose((self.end,), turn.reasoning)
        turn.reasons = False


NOTHING = Before()
HARMONY = "openai"
TOOL_PARSERS: Mapping[str, CallFormat] = {
    "deepseek_v3": in_sections.DEEPSEEK_V3,
    "deepseek_v31": in_sections.DEEPSEEK_V31,
    "glm45": tagged.GLM45,
    "granite": as_json.GRANITE,
    "hermes": as_json.HERMES,
    "kimi_k2": in_sections.KIMI_K2,
    "llama3_json": as_json.LLAMA3,
    "mistral": as_json.MISTRAL,
    HARMONY: OPENAI,
    "qwen3_coder": tagged.QWEN3_CODER,
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

    tools: Mapping[str, Mapping[str, Any]]
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
        return TurnParser()

    def read(turn: MarkedTurn) -> Reading[None]:
        if reasoning is not None:
            yield from reasoning.read(turn, before)
        if calls is not None:
            yield from calls.read(turn)
        else:
            yield from turn.prose((), turn.content)

    make_id = random_id if calls is None else calls.make_id
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
    make_id = random_id if own is None else own.make_id
    if plan.forced:
        read = as_json.read_required if plan.forced is True else partial(as_json.read_named, name=str(plan.forced))
        return CallFormat(read, (), make_id), reasoning
    return (own if plan.tools and settings.enable_auto_tool_choice else None), reasoning


_SHOWN = (
    (("```json", in_sections.SEPARATOR), "deepseek_v3"),
    ((in_sections.SEPARATOR,), "deepseek_v31"),
    ((in_sections.KIMI.call,), "kimi_k2"),
    ((CHANNEL,), HARMONY),
    ((as_json.TOOL_CALLS,), "mistral"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|start_header_id|>", '"parameters": '), "llama3_json"),
)
"""What a chat template has that shows calls to the model -> their format. The first row counts of which it has all."""


def tool_parser_of(template: str) -> str | None:
    """The format of calls that a chat template shows; None if it shows none that is known."""
    return next((name for words, name in _SHOWN if all(word in template for word in words)), None)


def with_defaults(settings: TurnSettings, template: str | None) -> TurnSettings:
    """The settings, completed by what the model's chat template shows; None for a model without one.

    Raises:
        ConfigError: the model may call tools, and nothing says how it writes calls.
    """
    shown = None if template is None else tool_parser_of(template)
    if shown == HARMONY and settings.reasoning_parser is None:  # its messages are no text to be shown as it is
        settings = replace(settings, reasoning_parser=HARMONY_REASONING)
    if not settings.enable_auto_tool_choice or settings.tool_call_parser is not None:
        return settings
    if shown is None:
        raise ConfigError(
            "--enable-auto-tool-choice needs --tool-call-parser: the model's chat template does not show how it writes "
            f"calls. Known are {', '.join(TOOL_PARSERS)}."
        )
    return replace(settings, tool_call_parser=shown)
