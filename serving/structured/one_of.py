"""`oneOf` by `anyOf`: the options of a schema are made such that no value fits two of them.

A value that is generated must fit exactly one option. Most schemas have options that exclude each other anyway: by
type, by a constant in a member that both have, by members that one requires and the other forbids. Where they do not,
an option is narrowed by a required member of the other. What is left cannot be expressed, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from model_runner import RequestError

Schema = bool | Mapping[str, Any]
Resolve = Callable[[str], Schema]
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_DEPTH = 6  # references and members that a comparison follows
MAX_OPTIONS = 256


def separated(options: Sequence[Schema], resolve: Resolve) -> list[Schema]:
    """The options, narrowed such that each value fits at most one of those that were given.

    Raises:
        RequestError: two options may fit one value, and nothing in them tells which.
    """
    if len(options) > MAX_OPTIONS:
        raise RequestError(f"oneOf has {len(options)} options; at most {MAX_OPTIONS} are taken. Use anyOf.")
    out = list(options)
    for first, one in enumerate(options):
        for second in range(first + 1, len(options)):
            other = options[second]
            if disjoint(one, other, resolve):
                continue
            narrowed = _narrowed(out[first], out[second], one, other, resolve)
            if narrowed is None:
                raise RequestError(
                    f"oneOf: a value may fit both option {first} and option {second}, which cannot be excluded. Use "
                    f"anyOf, or give the options a required member with a different const in each."
                )
            out[first], out[second] = narrowed
    return out


def _narrowed(
    first: Schema, second: Schema, one: Schema, other: Schema, resolve: Resolve
) -> tuple[Schema, Schema] | None:
    """Two options that exclude each other's originals (`one`, `other`); None if nothing is found that would."""
    a, b = _flat(one, resolve), _flat(other, resolve)
    if (_types(a) & _types(b)) - {"object"} and not (_only_members(a) and _only_members(b)):
        return None
    mine, theirs = a.get("properties", {}), b.get("properties", {})
    for name in mine:
        if name in theirs and disjoint(mine[name], theirs[name], resolve):
            return _with(first, required=name), _with(second, required=name)
    here, there = a.get("required", ()), b.get("required", ())
    absent = next((name for name in there if name not in here), None)
    absent_there = next((name for name in here if name not in there), None)
    if absent is None or absent_there is None:
        return None
    return _with(first, absent=absent), _with(second, absent=absent_there)


def _with(option: Schema, *, required: str = "", absent: str = "") -> Schema:
    """An option for objects only, which have, or lack, a member."""
    more: dict[str, Any] = {"type": "object"}
    if required:
        more["required"] = [required]
    if absent:
        more["properties"] = {absent: False}
    return more if option is True else {"allOf": [option, more]}


def disjoint(one: Schema, other: Schema, resolve: Resolve, depth: int = _DEPTH) -> bool:
    """Whether certainly no value fits both schemas. False where it cannot be told."""
    if one is False or other is False:
        return True
    if depth == 0:
        return False
    a, b = _flat(one, resolve), _flat(other, resolve)
    for these, those in ((a, b), (b, a)):
        for options in (these.get("anyOf"), these.get("oneOf")):
            if options and all(disjoint(each, those, resolve, depth - 1) for each in options):
                return True
        if any(disjoint(each, those, resolve, depth - 1) for each in these.get("allOf", ())):
            return True
    values, others = _values(a), _values(b)
    if values is not None and others is not None:
        return not any(_equal(value, each) for value in values for each in others)
    return all(_disjoint_in(kind, a, b, resolve, depth) for kind in _types(a) & _types(b))


def _disjoint_in(kind: str, a: Mapping[str, Any], b: Mapping[str, Any], resolve: Resolve, depth: int) -> bool:
    match kind:
        case "number":
            return _apart(a, b, "minimum", "maximum") or _apart(a, b, "exclusiveMinimum", "exclusiveMaximum")
        case "string":
            return _apart(a, b, "minLength", "maxLength")
        case "array":
            return _apart(a, b, "minItems", "maxItems")
        case "object":
            names = {*a.get("required", ()), *b.get("required", ())}
            return any(disjoint(_member(a, name), _member(b, name), resolve, depth - 1) for name in names)
        case _:
            return False


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


def _flat(schema: Schema, resolve: Resolve) -> Mapping[str, Any]:
    """A schema with what its `$ref` means beside its own keywords."""
    for _ in range(_DEPTH):
        if isinstance(schema, bool):
            return {} if schema else {"enum": []}
        if "$ref" not in schema:
            return schema
        rest = {name: value for name, value in schema.items() if name != "$ref"}
        target = resolve(schema["$ref"])
        schema = {"allOf": [target, rest]} if rest else target
    return {}


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


def _equal(one: Any, other: Any) -> bool:
    return _type_of(one) == _type_of(other) and bool(one == other)


def _only_members(schema: Mapping[str, Any]) -> bool:
    """Whether all that a schema says is about the members of objects, so that it takes anything else."""
    return schema.keys() <= {"required", "properties", "patternProperties", "additionalProperties"}
