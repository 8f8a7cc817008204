"""The turns of an answer while they are generated: each output's text, read as content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from model_runner import FinishReason
from serving.api.generation import Delta, Output
from serving.api.prompts import REASONING
from serving.api.schema.request_models import GenerationRequest
from serving.api.service import Service
from serving.text.tokenizer import Vocabulary
from serving.turns import (
    Before,
    ToolCallDelta,
    TurnDelta,
    TurnParser,
    TurnPlan,
    TurnSettings,
    make_turn_parser,
    marks_of,
)

if TYPE_CHECKING:
    from serving.structured import After

TOOL_CALLS = "tool_calls"
"""The finish reason of an output that ended with calls."""


@dataclass
class OutputTurn:
    """One output's turn.

    Attributes:
        named: the request names the call: then OpenAI's finish reason is not `tool_calls`.
        streamed: the parts are sent as they come, and not kept.
        new: what the last delta has brought.
        parts: all that was kept.
        finish_reason: why the turn has ended; None before.
        num_reasoning_tokens: tokens of the reasoning, without its marks.
    """

    parser: TurnParser
    named: bool
    streamed: bool
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
            self.finish_reason = TOOL_CALLS if stopped and parser.num_calls and not self.named else delta.finish_reason
        self.new = new
        if not self.streamed:
            self.parts.append(new)

    def whole(self) -> TurnDelta:
        """All parts that were kept, as one."""
        return _together(self.parts)


def hidden_marks(service: Service, body: GenerationRequest, plan: TurnPlan) -> Mapping[str, int]:
    """The parser's marks that are special tokens, with their ids, where a client should not see such tokens."""
    if body.skip_special_tokens is False:
        return {}
    vocabulary = Vocabulary.of(service.tokenizer)
    ids = {mark: vocabulary.special_id(mark) for mark in sorted(marks_of(service.turns, plan))}
    return {mark: token for mark, token in ids.items() if token is not None}


def preamble(settings: TurnSettings, before: Before) -> After | None:
    """The reasoning that may come before an answer's own form; None where there is none."""
    from serving.structured import Messages, Preamble

    if settings.harmony:
        return Messages()
    reasoning = settings.reasoning
    if reasoning is None or reasoning.is_over(before):
        return None
    return Preamble(reasoning.begin, reasoning.end, reasoning.has_begun(before))


def make_turns(
    service: Service,
    outputs: Sequence[Output],
    plan: TurnPlan,
    *,
    before: Before,
    streamed: bool,
    hidden: Mapping[str, int],
) -> dict[int, OutputTurn]:
    """A turn for each output, by its index; see `make_turn_parser`."""
    return {
        output.index: OutputTurn(
            make_turn_parser(service.turns, plan, before=before, streamed=streamed, hidden=hidden.keys()),
            named=isinstance(plan.forced, str),
            streamed=streamed,
        )
        for output in outputs
    }


def message_of(turn: TurnDelta, *, with_reasoning: bool) -> dict[str, Any]:
    """The parts of a whole answer's message; null content beside calls, or where all is reasoning."""
    message: dict[str, Any] = {"content": turn.content}
    if not turn.content and (turn.tool_calls or turn.reasoning):
        message["content"] = None
    if turn.reasoning and with_reasoning:
        message |= _reasoning(turn)
    if turn.tool_calls:
        calls: dict[int, dict[str, Any]] = {}
        for part in turn.tool_calls:
            call = calls.setdefault(part.index, _call(part))
            call["function"]["arguments"] += part.arguments
        message["tool_calls"] = [*calls.values()]
    return message


def chunks_of(turn: TurnDelta, *, with_reasoning: bool) -> list[dict[str, Any]]:
    """The deltas of a stream's events: one of reasoning and content, then one for each part of a call."""
    chunks: list[dict[str, Any]] = []
    said = _reasoning(turn) if turn.reasoning and with_reasoning else {}
    if turn.content:
        said["content"] = turn.content
    if said:
        chunks.append(said)
    for part in turn.tool_calls:
        call = {"function": {"arguments": part.arguments}} if part.name is None else _call(part)
        chunks.append({"tool_calls": [{"index": part.index, **call}]})
    return chunks


def _reasoning(turn: TurnDelta) -> dict[str, str]:
    return dict.fromkeys(REASONING, turn.reasoning)


def _call(first: ToolCallDelta) -> dict[str, Any]:
    """A call that begins, from its first part."""
    return {"id": first.id, "type": "function", "function": {"name": first.name, "arguments": ""}}


def _together(parts: Sequence[TurnDelta]) -> TurnDelta:
    return TurnDelta(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.tool_calls),
    )
