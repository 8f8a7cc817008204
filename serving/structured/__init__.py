"""Structured outputs: from what a request asks for to a grammar, and a grammar's state while tokens are generated.

StructuredOutputsParams   what a user gives (vLLM's fields): a JSON schema, a regular expression, choices, ...
grammar                   the same as text for llguidance; travels to the engine as `SamplingParams.grammar`
matcher                   a request's state in the engine: which tokens may come next
"""

from serving.structured.params import StructuredOutputsParams

__all__ = ["StructuredOutputsParams"]
