"""An assistant's turn, read from generated text as it arrives: content, reasoning and tool calls.

turn             the parts of a turn, and what a parser does
reading          a text that is read while it arrives, by generators
marked           a turn whose parts are marked in its text: what all formats share; sections has marks around calls
json_text        JSON, piece by piece; json_calls reads calls from it, and typed_values writes arguments as JSON
reasoning        the reasoning at the beginning of a turn
formats          how each family writes calls
parsers          all by name, and `make_turn_parser`
families         which of them a model's chat template shows
"""

from serving.turns.families import with_defaults
from serving.turns.parsers import REASONING_PARSERS, TOOL_PARSERS, TurnPlan, TurnSettings, make_turn_parser, marks_of
from serving.turns.reasoning import Before
from serving.turns.turn import ToolCallDelta, TurnDelta, TurnParser

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Before",
    "ToolCallDelta",
    "TurnDelta",
    "TurnParser",
    "TurnPlan",
    "TurnSettings",
    "make_turn_parser",
    "marks_of",
    "with_defaults",
]
