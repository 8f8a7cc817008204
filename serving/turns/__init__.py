"""An assistant's turn, read from generated text as it arrives: content, reasoning and tool calls."""

from serving.turns.turn import PlainTurn, ToolCallDelta, TurnDelta, TurnParser

__all__ = ["PlainTurn", "ToolCallDelta", "TurnDelta", "TurnParser"]
