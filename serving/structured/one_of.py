"""`oneOf` by `anyOf`: the options of a schema are made such that no value fits two of them.

A value that is generated must fit exactly one option. Most schemas have options that exclude each other anyway: by
type, by a constant in a member that both have, by members that one requires and the other forbids. Where they do not,
each option is narrowed to what does not fit the other (`complement`). Where that cannot be written, it is refused.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from model_runner import RequestError
from serving.structured.complement import Schema, complement, member_of, type_of, types_of, values_of
from serving.structured.patterns import OWN_FORMATS, pattern_of

Resolve = Callable[[str], Schema]
_FORMATS = frozenset({"date", "date-time", "time", "duration", "email", "ipv4", "ipv6", "uuid"})
"""Formats that exclude each other."""
_WRITTEN = {pattern_of(name): name for name in OWN_FORMATS}
"""Patterns that were formats."""
_DEPTH = 6  # references and members that a comparison follows
_MOST_ALTERNATIVES = 64
"""Most ways in which one option is kept apart from all others; beyond, it is one way for each of them."""
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
        without: list[list[Sequence[Schema]]] = [[] for _ in options]
        for first, second in combinations(range(len(options)), 2):
            if self.disjoint(options[first], options[second]):
                continue
            for here, there in ((first, second), (second, first)):
                found = self._without(options[here], options[there])
                if found is None:
                    raise RequestError(
                        f"oneOf: a value may fit both option {first} and option {second}, which cannot be excluded. "
                        f"Use anyOf, or give the options a required member with a different const in each."
                    )
                without[here].append(found)
        return [_narrowed(option, found) for option, found in zip(options, without, strict=True)]

    def _without(self, one: Schema, other: Schema) -> Sequence[Schema] | None:
        """What fits one option may be besides, one of these, so as not to fit the other; None if it cannot be told."""
        found = complement(other, one, _DEPTH, self._counted, self.disjoint)
        options = [option for option in found.options if not self.disjoint(option, one)]
        return options if options or found.exact else None

    def disjoint(self, one: Schema, other: Schema, depth: int = _DEPTH) -> bool:
        """Whether certainly no value fits both schemas. False where it cannot be told."""
        self._count()
        if one is False or other is False:
            return True
        if depth == 0:
            return False
        a, b = self._flat(one), self._flat(other)
        values, others = values_of(a), values_of(b)
        if values is not None and others is not None:
            return not _common(values, others)
        for known, schema in ((values, b), (others, a)):
            if known is not None and not any(
                _may_fit(each, schema) for each in known if type_of(each) in types_of(schema)
            ):
                return True
        for these, those in ((a, b), (b, a)):
            for options in (these.get("anyOf"), these.get("oneOf")):
                if options and all(self.disjoint(each, those, depth - 1) for each in options):
                    return True
            if any(self.disjoint(each, those, depth - 1) for each in these.get("allOf", ())):
                return True
        return all(self._disjoint_in(kind, a, b, depth) for kind in types_of(a) & types_of(b))

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
                return any(self.disjoint(member_of(a, name), member_of(b, name), depth - 1) for name in names)
            case _:
                return False

    def _count(self) -> None:
        self._comparisons += 1
        if self._comparisons > MAX_COMPARISONS:
            raise RequestError("oneOf has too many options, or too much in them, to tell them apart. Use anyOf.")

    def _counted(self, schema: Schema) -> Mapping[str, Any]:
        self._count()
        return self._flat(schema)

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


def _narrowed(option: Schema, without: Sequence[Sequence[Schema]]) -> Schema:
    """An option that is besides one of each list."""
    if not without:
        return option
    if not all(without):
        return False
    if math.prod(map(len, without)) > _MOST_ALTERNATIVES:
        without = [each[:1] for each in without]
    return {"allOf": [option, *(each[0] if len(each) == 1 else {"anyOf": list(each)} for each in without)]}


def _apart(a: Mapping[str, Any], b: Mapping[str, Any], least: str, most: str) -> bool:
    return any(least in one and most in two and one[least] > two[most] for one, two in ((a, b), (b, a)))


def _common(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether a value is in both lists. `true` is not 1, but 1.0 is."""
    mine, theirs = (
        {(type_of(each), json.dumps(_plain(each), sort_keys=True)) for each in given} for given in (values, others)
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
