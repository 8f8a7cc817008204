"""`oneOf` by `anyOf`: the options of a schema are made such that no value fits two of them.

A value that is generated must fit exactly one option. Most schemas have options that exclude each other anyway: by
type, by a constant in a member that both have, by members that one requires and the other forbids. Where they do not,
an option is narrowed by a required member of the other. What is left cannot be expressed, and is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from model_runner import RequestError
from serving.structured.formats import OWN, pattern_of

Schema = bool | Mapping[str, Any]
Resolve = Callable[[str], Schema]
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_FORMATS = frozenset({"date", "date-time", "time", "duration", "email", "ipv4", "ipv6", "uuid"})
"""Formats that exclude each other."""
_WRITTEN = {pattern_of(name): name for name in OWN}
"""Patterns that were formats."""
_DEPTH = 6  # references and members that a comparison follows
MAX_COMPARISONS = 20_000
"""Most comparisons of two schemas, all that lie inside included: some tenths of a second."""


class OneOf:
    """What is known of the `oneOf`s of one document.

    Args:
        resolve: gives what a `$ref` means.
    """

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._comparisons = 0

    def separated(self, options: Sequence[Schema]) -> list[Schema]:
        """The options, narrowed such that each value fits at most one of those that were given.

        Raises:
            RequestError: two options may fit one value, and nothing in them tells which; or there are too many.
        """
        more = [_More() for _ in options]
        for first, one in enumerate(options):
            for second in range(first + 1, len(options)):
                other = options[second]
                if not self.disjoint(one, other) and not self._narrow(one, other, more[first], more[second]):
                    raise RequestError(
                        f"oneOf: a value may fit both option {first} and option {second}, which cannot be excluded. "
                        f"Use anyOf, or give the options a required member with a different const in each."
                    )
        return [each.beside(option) for option, each in zip(options, more, strict=True)]

    def _narrow(self, one: Schema, other: Schema, more: _More, more_other: _More) -> bool:
        """Have two options exclude each other, by their members; False if nothing is found that would."""
        a, b = self._flat(one), self._flat(other)
        if (_types(a) & _types(b)) - {"object"} and not (_only_members(a) and _only_members(b)):
            return False
        mine, theirs = a.get("properties", {}), b.get("properties", {})
        for name in mine:
            if name in theirs and self.disjoint(mine[name], theirs[name]):
                more.required[name] = more_other.required[name] = None
                return True
        here, there = a.get("required", ()), b.get("required", ())
        absent = next((name for name in there if name not in here), None)
        absent_there = next((name for name in here if name not in there), None)
        if absent is None or absent_there is None:
            return False
        more.absent[absent] = more_other.absent[absent_there] = False
        return True

    def disjoint(self, one: Schema, other: Schema, depth: int = _DEPTH) -> bool:
        """Whether certainly no value fits both schemas. False where it cannot be told."""
        self._comparisons += 1
        if self._comparisons > MAX_COMPARISONS:
            raise RequestError("oneOf has too many options, or too much in them, to tell them apart. Use anyOf.")
        if one is False or other is False:
            return True
        if depth == 0:
            return False
        a, b = self._flat(one), self._flat(other)
        values, others = _values(a), _values(b)
        if values is not None and others is not None:
            return not _common(values, others)
        for known, schema in ((values, b), (others, a)):
            if known is not None and not any(
                _may_fit(each, schema) for each in known if _type_of(each) in _types(schema)
            ):
                return True
        for these, those in ((a, b), (b, a)):
            for options in (these.get("anyOf"), these.get("oneOf")):
                if options and all(self.disjoint(each, those, depth - 1) for each in options):
                    return True
            if any(self.disjoint(each, those, depth - 1) for each in these.get("allOf", ())):
                return True
        return all(self._disjoint_in(kind, a, b, depth) for kind in _types(a) & _types(b))

    def _disjoint_in(self, kind: str, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        match kind:
            case "number":
                return _above(a, b) or _above(b, a)
            case "string":
                formats = {_format(each) for each in (a, b)}
                return len(formats & _FORMATS) == 2 or _apart(a, b, "minLength", "maxLength")
            case "array":
                return _apart(a, b, "minItems", "maxItems")
            case "object":
                names = {*a.get("required", ()), *b.get("required", ())}
                return any(self.disjoint(_member(a, name), _member(b, name), depth - 1) for name in names)
            case _:
                return False

    def _flat(self, schema: Schema) -> Mapping[str, Any]:
        """A schema with what its `$ref` means beside its own keywords."""
        for _ in range(_DEPTH):
            if isinstance(schema, bool):
                return {} if schema else {"enum": []}
            if "$ref" not in schema:
                return schema
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            target = self._resolve(schema["$ref"])
            schema = {"allOf": [target, rest]} if rest else target
        return {}


@dataclass
class _More:
    """What an option gets besides: members that its values must have, and must not have."""

    required: dict[str, None] = field(default_factory=dict)
    absent: dict[str, bool] = field(default_factory=dict)

    def beside(self, option: Schema) -> Schema:
        """The option with it, which is then for objects only."""
        if not self.required and not self.absent:
            return option
        more = {"type": "object", "required": list(self.required), "properties": self.absent}
        return more if option is True else {"allOf": [option, more]}


def _apart(a: Mapping[str, Any], b: Mapping[str, Any], least: str, most: str) -> bool:
    return any(least in one and most in two and one[least] > two[most] for one, two in ((a, b), (b, a)))


def _member(schema: Mapping[str, Any], name: str) -> Schema:
    """What a member of this name must be, as far as it is told."""
    known: Schema | None = schema.get("properties", {}).get(name)
    if known is not None:
        return known
    if "patternProperties" in schema:
        return True
    rest: Schema = schema.get("additionalProperties", True)
    return rest


def _types(schema: Mapping[str, Any]) -> set[str]:
    values = _values(schema)
    if values is not None:
        return {_type_of(value) for value in values}
    told = schema.get("type", _TYPES)
    names = {told} if isinstance(told, str) else {*told}
    return {"number" if name == "integer" else name for name in names}


def _values(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    if "const" in schema:
        return (schema["const"],)
    values: Sequence[Any] | None = schema.get("enum")
    return values


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _common(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether a value is in both lists. `true` is not 1, but 1.0 is."""
    mine, theirs = (
        {(_type_of(each), json.dumps(_plain(each), sort_keys=True)) for each in given} for given in (values, others)
    )
    return bool(mine & theirs)


def _may_fit(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value of one of a schema's types may fit it."""
    if isinstance(value, bool | None):
        return True
    if isinstance(value, int | float):
        return not _above({"minimum": value}, schema) and not _above(schema, {"maximum": value})
    if not isinstance(value, str):
        return True
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return False
    try:
        return all(re.search(pattern, value) for pattern in _patterns(schema))
    except re.error:  # not in Python's notation
        return True


def _above(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether all numbers of one schema are above all of another."""
    lows = [(a[name], name == "exclusiveMinimum") for name in ("minimum", "exclusiveMinimum") if name in a]
    highs = [(b[name], name == "exclusiveMaximum") for name in ("maximum", "exclusiveMaximum") if name in b]
    return any(low > high or (low == high and (open_ or ends)) for low, open_ in lows for high, ends in highs)


def _patterns(schema: Mapping[str, Any]) -> list[str]:
    return [
        each["pattern"]
        for each in (schema, *schema.get("allOf", ()))
        if isinstance(each, Mapping) and "pattern" in each
    ]


def _format(schema: Mapping[str, Any]) -> str | None:
    """The `format` of a schema, also of one that is written as a pattern already."""
    return schema.get("format") or next((_WRITTEN[each] for each in _patterns(schema) if each in _WRITTEN), None)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _only_members(schema: Mapping[str, Any]) -> bool:
    """Whether all that a schema says is about the members of objects, so that it takes anything else."""
    return schema.keys() <= {"required", "properties", "patternProperties", "additionalProperties"}
