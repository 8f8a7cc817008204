"""Numbers as llguidance must be given them, such that what is written is also valid for `jsonschema`.

`multipleOf`: `jsonschema` divides floats.

    the step                       what is made of it
    an integer                     as it is
    exact in binary (0.5, 1.25)    bounds, within which floats hold all its multiples exactly
    any other (0.1, 0.01)          the multiples between the schema's bounds, one by one, but for those that
                                   `jsonschema` calls none: 0.3 / 0.1 is 2.9999999999999996

Bounds: llguidance has two faults, which are written around here.

    exclusiveMinimum: 0, maximum: 0.5     it takes 0, too: the whole number at an open end, where the other is near
    maximum: 2.25                         it does not take 2.2: what the bound begins with
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from model_runner import RequestError
from serving.structured.complement import Schema
from ubatch.errors import shown

MAX_LISTED = 10_001
"""Most multiples that are listed for one schema: cents from 0 to 100."""
MOST_EXACT = 2**53
"""Integers up to here are floats, too."""
_MOST_DECIMALS = 6
_FINEST = 2**20


def is_exact(step: float) -> bool:
    """Whether all small multiples of a step are floats."""
    return _decimal(step) == Fraction(step) and Fraction(step).denominator <= _FINEST


def exact_bounds(step: float) -> tuple[float, float] | None:
    """The bounds within which all multiples of a step that is no integer are floats; None for an integer."""
    if isinstance(step, int):
        return None
    most = MOST_EXACT // Fraction(step).denominator
    return -most, most


def coarser(step: float) -> list[float]:
    """Multiples of a step that have fewer decimals: the library writes all multiples with as many as the step has."""
    exact = _decimal(step)
    digits = next((count for count in range(_MOST_DECIMALS) if (exact * 10**count).denominator == 1), 0)
    units = [Fraction(1, 10**count) for count in range(1, digits)]
    return [float(_common_multiple(exact, unit)) for unit in units]


def listed(schema: Mapping[str, Any], room: int) -> list[float]:
    """The multiples between a schema's bounds, whole ones as integers.

    Args:
        room: most that may be listed.

    Raises:
        RequestError: the schema does not bound them, or they are too many.
    """
    step = schema["multipleOf"]
    lows = [schema[name] for name in ("minimum", "exclusiveMinimum") if name in schema]
    highs = [schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema]
    exact = _decimal(step)
    if schema.get("type") == "integer":
        exact = _common_multiple(exact, Fraction(1))
    if lows and highs:
        first = math.ceil(_decimal(max(lows)) / exact)
        last = math.floor(_decimal(min(highs)) / exact)
        if last - first < room:
            values = [_number(exact * count) for count in range(first, last + 1)]
            return [value for value in values if is_multiple(value, step) and _fits(value, schema)]
    raise RequestError(
        f"{shown(step)} is not supported without a minimum and a maximum beside it with at most {MAX_LISTED:,} "
        f"multiples between them, in all of the schema: in floats, many of its multiples are none (0.3 / 0.1 is below "
        f"3). Give both, use an integer of the smaller unit, or leave multipleOf out."
    )


def filtered(values: Sequence[Any], step: float) -> list[Any]:
    """Of some constants, those that are no numbers, or multiples of a step."""
    return [
        value
        for value in values
        if isinstance(value, bool) or not isinstance(value, int | float) or is_multiple(value, step)
    ]


def is_multiple(value: float, step: float) -> bool:
    """As `jsonschema` sees it, for a step that is a float."""
    quotient = value / step
    return math.isfinite(quotient) and int(quotient) == quotient


def _decimal(number: float) -> Fraction:
    return Fraction(str(number))


def _number(value: Fraction) -> float:
    return int(value) if value.denominator == 1 else float(value)


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))


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


def with_bounds(schema: Schema) -> Schema:
    """A schema that `normalised` has made, with all bounds written so."""
    if not isinstance(schema, Mapping):
        return schema
    out = {
        **schema,
        **{name: with_bounds(schema[name]) for name in _ONE if name in schema},
        **{name: [with_bounds(each) for each in schema[name]] for name in _LISTS if name in schema},
        **{
            name: {key: with_bounds(each) for key, each in schema[name].items()} for name in _MAPPINGS if name in schema
        },
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
    return [value for value in begun if _fits(value, schema)]


def _fits(value: float, schema: Mapping[str, Any]) -> bool:
    """Whether a number is within a schema's bounds."""
    return all(_FITS[name](value, schema[name]) for name in _FITS.keys() & schema.keys())
