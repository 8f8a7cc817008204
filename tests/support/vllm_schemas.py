"""Which keywords of JSON Schema vLLM refuses in a schema: facts, read in copies of its source; it was not run.

Its `auto` asks xgrammar's check first, and takes a schema that this passes. What it refuses goes to llguidance, as that
library reads it without help; schemas with `patternProperties` go to outlines in its place.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NOT_LOOKED_AT", "REFUSED_BY_XGRAMMAR", "STRICTER", "XGRAMMAR_FORMATS"]

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
NOT_LOOKED_AT = frozenset(
    {
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that xgrammar's check does not look at, and that no grammar here can make. Whether an output is valid is not
told then, and llguidance, asked alone, refuses each. They are refused here."""
STRICTER: Mapping[str, tuple[dict[str, object], str]] = {
    "oneOf": (
        {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
        "it passes the check; xgrammar takes it for anyOf, and writes what fits two options",
    ),
    "multipleOf": (
        {"type": "number", "multipleOf": 0.01},
        "llguidance writes 0.07, which validators in floats call no multiple of 0.01",
    ),
    "const": ({"const": 2**53 + 1}, "llguidance rounds it"),
    "minimum": ({"type": "number", "minimum": 1e19}, "llguidance writes bounds as integers of 64 bits"),
    "minProperties": ({"type": "object", "minProperties": 2}, "the same name, written twice, is counted as two"),
}
"""What is refused here in some schemas only, and taken by vLLM -> such a schema, and why it is not taken here."""
