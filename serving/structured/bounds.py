"""Bounds of numbers as llguidance must be given them: it has two faults, which are written around here.

exclusiveMinimum: 0, maximum: 0.5     it takes 0, too: the whole number at an open end, where the other is near
maximum: 2.25                         it does not take 2.2: what the bound begins with
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from serving.structured.complement import Schema

INWARD = {"minimum": math.inf, "exclusiveMinimum": math.inf, "maximum": -math.inf, "exclusiveMaximum": -math.inf}
"""Bound -> where the numbers within it lie."""
_FITS: Mapping[str, Callable[[float, float], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
_NEAR = 1e-9  # how far an open end that is a whole number is moved
_ONE = ("items", "additionalProperties")
_LISTS = ("prefixItems", "allOf", "anyOf")
_MAPPINGS = ("properties", "patternProperties", "$defs")


def written(schema: Schema) -> Schema:
    """A schema that `normalised` has made, with all bounds written so."""
    if not isinstance(schema, Mapping):
        return schema
    out = {
        **schema,
        **{name: written(schema[name]) for name in _ONE if name in schema},
        **{name: [written(each) for each in schema[name]] for name in _LISTS if name in schema},
        **{name: {key: written(each) for key, each in schema[name].items()} for name in _MAPPINGS if name in schema},
    }
    if not INWARD.keys() & out.keys() or out.get("type") == "integer":
        return out
    missed = _missed(out) if out.get("type") == "number" and not {"multipleOf", "enum", "const"} & out.keys() else []
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if name in out and float(out[name]).is_integer():
            near = out[name] + math.copysign(_NEAR, INWARD[name])
            out[name] = near if near != out[name] else math.nextafter(out[name], INWARD[name])
    if not missed:
        return out
    bounded = {name: out.pop(name) for name in INWARD if name in out}
    out["allOf"] = [*out.get("allOf", ()), {"anyOf": [{"type": "number", **bounded}, {"enum": missed}]}]
    return out


def _missed(schema: Mapping[str, Any]) -> list[float]:
    """What the upper bounds begin with, as far as all bounds allow it."""
    begun = [
        float(text[:end])
        for text in (f"{Decimal(str(schema[name])):f}" for name in ("maximum", "exclusiveMaximum") if name in schema)
        if "." in text and not text.startswith("-")
        for end in range(text.index(".") + 2, len(text))
    ]
    return [value for value in begun if all(_FITS[name](value, schema[name]) for name in _FITS.keys() & schema.keys())]
