"""Structured outputs: from what a request asks for to a grammar, and a grammar's state while tokens are generated.

StructuredOutputsParams   what a user gives (vLLM's fields): a JSON schema, a regular expression, choices, ...
grammar_text              the same as text for llguidance; travels to the engine as `SamplingParams.grammar`
GrammarChecks             tries such texts in processes with limits, and remembers which compile
limits                    what one grammar may take; the engine's matchers have the same
matcher                   in the engine: a request's state, which tokens may come next

    params -> grammar -> schema -> one_of (complement), numeric, patterns, references
                      -> writing, patterns
"""

from serving.structured.checks import GrammarChecks
from serving.structured.grammar import After, Messages, Preamble, grammar_text
from serving.structured.limits import limits
from serving.structured.params import StructuredOutputsParams

__all__ = ["After", "GrammarChecks", "Messages", "Preamble", "StructuredOutputsParams", "grammar_text", "limits"]
