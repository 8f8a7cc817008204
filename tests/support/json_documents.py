"""Documents for JSON schemas: valid ones made from a schema, broken ones made from these. `jsonschema` is the judge."""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from serving.structured.references import References

_ALPHABET = 'ab Z9_-.,:/{}[]<"\\\n\té漢😀'
_WRONG = (None, True, False, 0, -1, 7, 10**6, 0.3, -2.5, "", "~", "x" * 80, [], [None] * 60, {}, {"zz": 1})
_FORMS: Sequence[dict[str, Any]] = ({"separators": (",", ":")}, {}, {"indent": 2}, {"indent": 4}, {"indent": "\t"})
_BROKEN = ["x", "{]", '{"', "[1,]", "nul", "{'a':1}", "[1 2]", '{"a" 1}', "01", "+1", ".5", '"\\q"', '"\n"', "[1]]"]
_BROKEN += ["tru e", ""]
_SHORT_FORMATS = {"date", "date-time", "time", "ipv4", "ipv6", "uuid"}


def is_valid(schema: Any, value: Any) -> bool:
    """Whether a value fits a schema, formats included."""
    kind = validator_for(schema, default=Draft202012Validator)
    return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(value))


def texts_of(values: Sequence[Any], count: int) -> list[str]:
    """Values as JSON: `count` texts, each value in several forms if there are few."""
    texts = [json.dumps(value, ensure_ascii=False, **form) for form in _FORMS for value in values]
    mixed = [texts[place + len(values) * (place % len(_FORMS))] for place in range(len(values))] if values else []
    return list(dict.fromkeys((*mixed, *texts)))[:count]


class Documents:
    """Documents of one schema; equal seeds give equal ones."""

    def __init__(self, schema: Any, seed: int = 0) -> None:
        self._schema = schema
        self._random = random.Random(seed)
        self._references = References(schema)

    def valid(self, count: int) -> list[Any]:
        """Different valid values; fewer than `count` if hardly any more are found."""
        found: dict[str, Any] = {}
        for _ in range(60 * count):
            value = self._make(self._schema, 0)
            if is_valid(self._schema, value):
                found.setdefault(json.dumps(value), value)
            if len(found) == count:
                break
        return list(found.values())

    def broken(self, values: Sequence[Any], count: int) -> list[str]:
        """Texts that are not valid: values with a change that breaks them, and what is no JSON."""
        found: dict[str, None] = {}
        for _ in range(30 * count):
            if len(found) == count or not values:
                break
            changed = self._changed(self._random.choice(values))
            if not is_valid(self._schema, changed):
                found[json.dumps(changed, ensure_ascii=False)] = None
        return [*found, *self._random.sample(_BROKEN, count)][:count]

    # -- valid ones

    def _make(self, schema: Any, depth: int) -> Any:
        roll = self._random
        if isinstance(schema, bool):
            return roll.choice((None, 5, "a", [True], {"k": 1.5}))
        if schema.get("examples") and "type" in schema | {"type": 0}:
            return roll.choice(schema["examples"])
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = schema[keyword]
                simple = [each for each in options if "$ref" not in json.dumps(each)] if depth > 3 else []
                rest = {name: value for name, value in schema.items() if name != keyword}
                return self._make(_merged(rest, roll.choice(simple or options)), depth)
        if "allOf" in schema:
            merged = {name: value for name, value in schema.items() if name != "allOf"}
            for part in schema["allOf"]:
                part = self._target(part)
                if isinstance(part, Mapping) and "anyOf" in part:
                    part = _merged({**part, "anyOf": []}, roll.choice(part["anyOf"]))
                    del part["anyOf"]
                merged = _merged(merged, part)
            return self._make(merged, depth)
        if "$ref" in schema:
            others = ("$ref", "$defs", "definitions", "$id")
            rest = {name: value for name, value in schema.items() if name not in others}
            return self._make(_merged(self._target(schema), rest), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return roll.choice(schema["enum"])
        return self._of_type(schema, depth)

    def _target(self, schema: Any) -> Any:
        for _ in range(8):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            base = self._schema.get("$id", "")
            schema = self._references.resolve(schema["$ref"], base)[1]
        return schema

    def _of_type(self, schema: Mapping[str, Any], depth: int) -> Any:
        roll = self._random
        kinds = schema.get("type") or ("object" if "properties" in schema else ["integer", "string", "null"])
        kind = kinds if isinstance(kinds, str) else roll.choice(kinds)
        match kind:
            case "null":
                return None
            case "boolean":
                return roll.random() < 0.5
            case "integer" | "number":
                return self._number(schema, whole=kind == "integer")
            case "string":
                least = schema.get("minLength", 0)
                most = min(schema.get("maxLength", least + 6), least + 20)
                return "".join(roll.choices(_ALPHABET, k=roll.randint(least, max(least, most))))
            case "array":
                return self._array(schema, depth)
            case _:
                return self._object(schema, depth)

    def _number(self, schema: Mapping[str, Any], *, whole: bool) -> Any:
        low = max(schema.get("minimum", -1000), _bound(schema, "exclusiveMinimum", -1000))
        high = min(schema.get("maximum", low + 2000), _bound(schema, "exclusiveMaximum", low + 2000))
        low = max(low, high - 3000) if "minimum" not in schema else low
        step = schema.get("multipleOf")
        if step is not None:
            return _short(float(round(self._random.uniform(low, high) / step) * Decimal(str(step))))
        value = self._random.uniform(low, high)
        return round(value) if whole else self._random.choice((round(value, 2), round(value, 6), round(value)))

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        items = schema.get("items", True)
        old = isinstance(items, list)
        heads = items if old else [] if "draft-07" in str(schema.get("$schema")) else schema.get("prefixItems", [])
        rest = schema.get("additionalItems", True) if old else items
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", max(least, len(heads)) + 3), least + 12) if depth < 5 else least
        most = min(most, len(heads)) if rest is False else most
        count = self._random.randint(least, max(least, most))
        return [self._make(heads[place] if place < len(heads) else rest, depth + 1) for place in range(count)]

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        roll = self._random
        properties, required = schema.get("properties", {}), schema.get("required", [])
        rest = schema.get("additionalProperties", True)
        made: dict[str, Any] = {}
        for name in (*properties, *(name for name in required if name not in properties)):
            if name in required or (properties[name] is not False and depth < 5 and roll.random() < 0.6):
                made[name] = self._make(properties.get(name, rest), depth + 1)
        if rest is not False and not schema.get("patternProperties"):
            most = min(2, schema.get("maxProperties", 9) - len(made))
            for number in range(roll.randint(min(max(0, most), schema.get("minProperties", 0)), max(0, most))):
                made[f"more {number}é"] = self._make(rest, depth + 1)
        return made

    # -- broken ones

    def _changed(self, value: Any) -> Any:
        """A copy with one change somewhere."""
        return self._at(value, self._random.choice([*_places(value)]))

    def _at(self, value: Any, place: Sequence[Any]) -> Any:
        roll = self._random
        if place:
            first, *others = place
            inner = self._at(value[first], others)
            if isinstance(value, dict):
                return {name: inner if name == first else each for name, each in value.items()}
            return [inner if number == first else each for number, each in enumerate(value)]
        if isinstance(value, dict) and value and roll.random() < 0.6:
            lost = roll.choice([*value])
            kept = {name: each for name, each in value.items() if name != lost}
            return kept if roll.random() < 0.6 else {**kept, f"{lost}~": value[lost]}
        if isinstance(value, dict) and roll.random() < 0.5:
            return {**value, "~added": 1}
        if isinstance(value, list) and roll.random() < 0.5:
            return value[:-1] if value and roll.random() < 0.5 else [*value, *value[-1:], None]
        if isinstance(value, str) and value and roll.random() < 0.5:
            cut = roll.randrange(len(value))
            return value[:cut] + roll.choice("~é0 ") + value[cut + roll.randint(0, 1) :]
        if isinstance(value, int | float) and not isinstance(value, bool) and roll.random() < 0.4:
            return value + roll.choice((0.123, 1000, -1000, 10**7))
        return roll.choice(_WRONG)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    if isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(each, (*place, name))


def _short(value: float) -> float:
    """A whole number without its point: the grammar of a multiple has no zeros at its end."""
    return int(value) if value == int(value) else value


def _bound(schema: Mapping[str, Any], keyword: str, otherwise: float) -> float:
    value = schema.get(keyword, otherwise)
    return otherwise if isinstance(value, bool) else value


def _merged(one: Any, other: Any) -> dict[str, Any]:
    """Both schemas' keywords, as far as a generator needs them."""
    one, other = ({} if isinstance(each, bool) else dict(each) for each in (one, other))
    out = {**one, **other}
    if "properties" in one and "properties" in other:
        mine, theirs = one["properties"], other["properties"]
        out["properties"] = {
            name: _merged(mine.get(name, {}), theirs.get(name, {})) or True for name in (*mine, *(theirs.keys() - mine))
        }
    if "required" in one and "required" in other:
        out["required"] = list(dict.fromkeys((*one["required"], *other["required"])))
    for keyword, choose in (("minimum", max), ("maximum", min), ("minLength", max), ("maxLength", min)):
        if keyword in one and keyword in other:
            out[keyword] = choose(one[keyword], other[keyword])
    for keyword in ("allOf", "anyOf"):
        if keyword in one and keyword in other:
            del out[keyword]
            out["allOf"] = [*out.get("allOf", []), {keyword: one[keyword]}, {keyword: other[keyword]}]
    return out


def is_bounded(schema: Any, root: Any, inside: tuple[str, ...] = ()) -> bool:
    """Whether all documents of a schema are shorter than some length. False where it cannot be told."""
    if isinstance(schema, bool):
        return not schema

    def each(schemas: Any) -> bool:
        return all(is_bounded(inner, root, inside) for inner in schemas)

    if "$ref" in schema:
        name = schema["$ref"]
        target = References(root).resolve(name, root.get("$id", ""))[1]
        return name not in inside and is_bounded(target, root, (*inside, name))
    if "enum" in schema or "const" in schema:
        return True
    for keyword, enough in (("anyOf", all), ("oneOf", all), ("allOf", any)):
        if keyword in schema and enough(is_bounded(inner, root, inside) for inner in schema[keyword]):
            return True
    kinds = schema.get("type")
    return bool(kinds) and all(
        _bounded_in(kind, schema, each) for kind in ([kinds] if isinstance(kinds, str) else kinds)
    )


def _bounded_in(kind: str, schema: Any, each: Any) -> bool:
    match kind:
        case "null" | "boolean":
            return True
        case "integer":
            bounds = [_bound(schema, name, math.inf) for name in ("minimum", "maximum")]
            return all(abs(bound) < math.inf for bound in bounds)
        case "string":
            return "maxLength" in schema or schema.get("format") in _SHORT_FORMATS
        case "array":
            heads, rest = schema.get("prefixItems", []), schema.get("items", True)
            ends = rest is False or "maxItems" in schema
            return ends and not isinstance(rest, list) and each((*heads, rest))
        case "object":
            closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
            return closed and each(schema.get("properties", {}).values())
        case _:
            return False
