"""What does not fit a schema, as schemas: JSON Schema's `not`, where other keywords can say it.

    type               the other types
    const, enum        other booleans, texts (a pattern), and numbers (the ranges between)
    bounds, lengths    what lies outside
    required           an object without one of the names
    properties         an object with one of them that does not fit
    closed objects     one of the other names that are known
    allOf, anyOf       what does not fit one of them, or any

Each value of an option certainly does not fit; where the options are all that there is, they are `exact`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import NoneType
from typing import Any, NamedTuple

Schema = bool | Mapping[str, Any]
_TYPE_NAMES: Mapping[type, str] = {
    NoneType: "null",
    bool: "boolean",
    **dict.fromkeys((int, float), "number"),
    str: "string",
    list: "array",
    dict: "object",
}
TYPES = frozenset(_TYPE_NAMES.values())
_SURE = 2**32
"""Bounds beyond this may have been moved to where floats are exact."""
_MOST_CONSTANTS = 200  # texts that a pattern excludes, or numbers that lie between ranges
_NUMBER_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_LENGTHS = {"minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1)}
_LENGTHS |= {"minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1)}
_LEFT_OUT = {
    "number": {"multipleOf"},
    "string": {"pattern", "format"},
    "array": {"items", "prefixItems"},
    "object": {"patternProperties", "minProperties", "maxProperties"},
}
"""Type -> its keywords for which there are no options."""


class Complement(NamedTuple):
    """What does not fit a schema.

    Attributes:
        options: schemas whose values do not fit it.
        exact: no other values do not.
    """

    options: list[Schema]
    exact: bool


Disjoint = Callable[[Schema, Schema], bool]
_Inner = Callable[[Schema, Schema], Complement]


def complement(
    schema: Schema, among: Schema, depth: int, flat: Callable[[Schema], Mapping[str, Any]], disjoint: Disjoint
) -> Complement:
    """What fits one schema, and not the other.

    Args:
        schema: the one that it does not fit.
        among: the other; the options may have more, and may leave out what does not fit it.
        depth: how deep members and references are followed.
        flat: resolves references.
        disjoint: whether certainly nothing fits two schemas.
    """
    if isinstance(schema, bool):
        return Complement([] if schema else [True], exact=True)
    if depth == 0:
        return Complement([], exact=False)
    b, a = flat(schema), flat(among)

    def inner(part: Schema, within: Schema) -> Complement:
        return complement(part, within, depth - 1, flat, disjoint)

    parts = [_types(b, a), _values(b, a), _bounds(b), _members(b, a, inner, disjoint)]
    parts += [inner(part, among) for part in b.get("allOf", ())]
    for keyword in ("anyOf", "oneOf"):
        if keyword in b:
            parts.append(_none_of([inner(part, among) for part in b[keyword]], exact=keyword == "anyOf"))
    done = not any(_LEFT_OUT.get(kind, set()) & b.keys() for kind in types_of(a))
    return Complement([option for part in parts for option in part.options], done and all(part.exact for part in parts))


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema takes, as far as it says; `number` for integers, too."""
    values = values_of(schema)
    if values is not None:
        return {type_of(value) for value in values}
    return {"number" if name == "integer" else name for name in _told_types(schema)}


def values_of(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """The values of a schema that lists them."""
    if "const" in schema:
        return (schema["const"],)
    return schema.get("enum")


def type_of(value: Any) -> str:
    """JSON's type of a value."""
    return next((name for kind, name in _TYPE_NAMES.items() if isinstance(value, kind)), "object")


def _told_types(schema: Mapping[str, Any]) -> set[str]:
    told = schema.get("type", TYPES)
    return {told} if isinstance(told, str) else {*told}


def _types(b: Mapping[str, Any], a: Mapping[str, Any]) -> Complement:
    if "type" not in b:
        return Complement([], exact=True)
    told = _told_types(b)
    others = sorted(TYPES - told - ({"number"} if "integer" in told else set()))
    whole = "integer" not in told or "number" in told or "number" not in types_of(a) or _only_integers(a)
    return Complement([{"type": others}] if others else [], whole)


def _only_integers(schema: Mapping[str, Any]) -> bool:
    values = values_of(schema)
    if values is not None:
        return all(type_of(value) != "number" or float(value).is_integer() for value in values)
    return "number" not in _told_types(schema)


def _values(b: Mapping[str, Any], a: Mapping[str, Any]) -> Complement:
    values = values_of(b)
    if values is None:
        return Complement([], exact=True)
    of: dict[str, list[Any]] = {kind: [value for value in values if type_of(value) == kind] for kind in TYPES}
    options: list[Schema] = [{"type": sorted(kind for kind in TYPES if not of[kind])}]
    if of["boolean"]:
        options += [{"enum": [value]} for value in (True, False) if value not in of["boolean"]]
    few = max(len(of["number"]), len(of["string"])) <= _MOST_CONSTANTS
    if of["number"] and few:
        numbers = sorted(of["number"])
        options += [{"type": "number", "exclusiveMaximum": numbers[0]}]
        options += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(numbers)
        ]
        options += [{"type": "number", "exclusiveMinimum": numbers[-1]}]
    if of["string"] and few:
        options += [{"type": "string", "pattern": _other_texts(of["string"])}]
    exact = few and not any(of[kind] and kind in types_of(a) for kind in ("array", "object"))
    return Complement(options, exact)


def _other_texts(texts: Sequence[str]) -> str:
    """A pattern, in llguidance's notation, of all texts but these."""

    def others(rests: Sequence[str]) -> str:
        """Of what may follow a beginning, all but these rests."""
        if not rests:
            return r"[^\x00]*"
        firsts: dict[str, list[str]] = {}
        for rest in rests:
            if rest:
                firsts.setdefault(rest[0], []).append(rest[1:])
        following = [f"{_sign(first)}{others(behind)}" for first, behind in firsts.items()]
        following.append(rf"[^\x00{''.join(map(_sign, firsts))}][^\x00]*")
        return f"(?:{'|'.join(following)}){'' if '' in rests else '?'}"

    return f"^{others(sorted(set(texts)))}$"


def _sign(character: str) -> str:
    return rf"\x{{{ord(character):X}}}"


def _bounds(b: Mapping[str, Any]) -> Complement:
    options: list[Schema] = []
    exact = True
    for keyword, opposite in _NUMBER_BOUNDS.items():
        if keyword in b:
            if abs(b[keyword]) <= _SURE:
                options.append({"type": "number", opposite: b[keyword]})
            else:
                exact = False
    for keyword, (kind, opposite, step) in _LENGTHS.items():
        if keyword in b and b[keyword] + step >= 0:
            options.append({"type": kind, opposite: b[keyword] + step})
    return Complement(options, exact)


def _members(b: Mapping[str, Any], a: Mapping[str, Any], inner: _Inner, disjoint: Disjoint) -> Complement:
    if "object" not in types_of(a):
        return Complement([], exact=True)
    options: list[Schema] = [
        {"type": "object", "properties": {name: False}}
        for name in b.get("required", ())
        if name not in a.get("required", ())
    ]
    exact = True
    for name, member in b.get("properties", {}).items():
        here = member_of(a, name)
        if here is False:
            continue
        if disjoint(here, member):
            options.append({"type": "object", "required": [name]})
            continue
        found = inner(member, here)
        exact &= found.exact
        options += [{"type": "object", "required": [name], "properties": {name: option}} for option in found.options]
    rest = b.get("additionalProperties", True)
    if rest is not True:
        names = [
            name for name in (*a.get("properties", ()), *a.get("required", ())) if name not in b.get("properties", ())
        ]
        if rest is False and "patternProperties" not in b:
            options += [
                {"type": "object", "required": [name]}
                for name in dict.fromkeys(names)
                if member_of(a, name) is not False
            ]
            exact &= a.get("additionalProperties") is False and "patternProperties" not in a
        else:
            exact = False
    return Complement(options, exact)


def member_of(schema: Mapping[str, Any], name: str) -> Schema:
    """What a member of this name must be, as far as it is told."""
    known: Schema | None = schema.get("properties", {}).get(name)
    if known is not None:
        return known
    if "patternProperties" in schema:
        return True
    return schema.get("additionalProperties", True)


def _none_of(parts: Sequence[Complement], *, exact: bool) -> Complement:
    exact &= all(part.exact for part in parts)
    if not all(part.options for part in parts):
        return Complement([], exact)
    return Complement([{"allOf": [{"anyOf": part.options} for part in parts]}], exact)
