"""How much one grammar may take: of a request's text, of time and memory to compile it, and of one step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_TEXT_BYTES = 2**18
"""Most bytes of a schema, a grammar, or of all choices together."""
MAX_REGEX_BYTES = 2**14
MAX_DEPTH = 64
"""Most lists and objects inside one another in a schema."""
MAX_COMPILE_S = 2.0
"""Most processor time of a grammar's compilation, in seconds."""
MAX_WAIT_S = 10.0
"""Most time of a compilation on a busy machine, in seconds."""
MAX_COMPILE_BYTES = 2**30
"""Most memory of the process that tries grammars: address space, most of it for Python and its libraries."""
MAX_WAITING = 256
"""Most different grammars that wait to be tried."""
MAX_KNOWN = 1024
"""Most grammars whose verdicts are remembered."""


LIMITS: Mapping[str, int | bool] = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 100_000,
    "max_lexer_states": 50_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "verbose_errors": False,
}
"""llguidance's limits. A step's fuel lasts for some milliseconds: a grammar that needs more ends its own request, and
holds up no other."""


@cache
def limits() -> LLParserLimits:
    """The limits of a grammar's compilation and of its work in one step; all who make a matcher use these."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)  # type: ignore[arg-type]
