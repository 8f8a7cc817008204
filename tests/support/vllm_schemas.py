"""Which keywords of JSON Schema vLLM (0.13 to 0.20) refuses in a schema: facts, read in its source and xgrammar's.

Its `auto` asks xgrammar's check first, and takes a schema that this passes. What it refuses goes to llguidance, as that
library reads it without help; schemas with `patternProperties` go to outlines in its place.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NOT_ENFORCED", "REFUSED_BY_XGRAMMAR", "STRICTER", "XGRAMMAR_FORMATS"]

REFUSED_BY_XGRAMMAR: Mapping[str, tuple[str, ...]] = {
    "multipleOf": ("integer", "number"),
    **dict.fromkeys(("uniqueItems", "contains", "minContains", "maxContains"), ("array",)),
    **dict.fromkeys(("patternProperties", "propertyNames"), ("object",)),
}
"""Keyword -> the `type`s beside which xgrammar's check refuses it."""
XGRAMMAR_FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer"),
        *("relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid"),
    }
)
"""It refuses any other `format` of a string."""
NOT_ENFORCED: Mapping[str, str] = {
    "not": "xgrammar leaves it out",
    "if": "xgrammar leaves it out",
    "then": "xgrammar leaves it out",
    "else": "xgrammar leaves it out",
    "dependentRequired": "xgrammar leaves it out",
    "dependentSchemas": "xgrammar leaves it out",
    "dependencies": "xgrammar leaves it out",
    "unevaluatedProperties": "xgrammar looks at the same schema alone, not at what stands beside it",
    "unevaluatedItems": "xgrammar looks at the same schema alone, not at what stands beside it",
    "$dynamicRef": "xgrammar leaves it out",
    "$recursiveRef": "xgrammar leaves it out",
}
"""Keywords that vLLM takes, with outputs that need not be valid -> what becomes of them. They are refused here."""
STRICTER: Mapping[str, tuple[dict[str, object], str]] = {
    "oneOf": (
        {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
        "xgrammar takes it for anyOf, and writes what fits two options",
    ),
    "multipleOf": (
        {"type": "number", "multipleOf": 0.01},
        "llguidance writes 0.07, which validators in floats call no multiple of 0.01",
    ),
    "const": ({"const": 2**53 + 1}, "llguidance rounds it"),
    "minimum": ({"type": "number", "minimum": 1e19}, "xgrammar's bounds are integers of 64 bits, too"),
    "minProperties": ({"type": "object", "minProperties": 2}, "the same name, written twice, is counted as two"),
}
"""What is refused here in some schemas only, and taken by vLLM -> such a schema, and why it is not taken here."""
