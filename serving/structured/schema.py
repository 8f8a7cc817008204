"""JSON schemas as llguidance takes them, such that what it generates is valid.

    given                                     made of it
    annotations (`title`, `default`, ...)     left out
    `$ref`, to a pointer, `$id` or `$anchor`  `#/$defs/0`, `#/$defs/1`, ...: only what is used, each once
    `items: [...]` of older drafts            `prefixItems`
    `oneOf`                                   `anyOf` of options that exclude each other (`one_of`)
    `format`, `pattern`                       regular expressions of its library (`patterns`)
    bounds beyond what floats tell apart      the next bound inside; others are written around faults (`numeric`)
    `multipleOf` with such steps as 0.1       a list of numbers (`numeric`)
    an assertion that a grammar cannot make   refused, by its name and place

What llguidance itself refuses, such as a schema that nothing fits, is found when the grammar is tried (`checks`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

from model_runner import RequestError
from serving.structured import numeric
from serving.structured.complement import TYPES, Schema
from serving.structured.limits import MAX_DEPTH
from serving.structured.one_of import OneOf
from serving.structured.patterns import LIBRARY_FORMATS, OWN_FORMATS, REFUSED_FORMATS, pattern_of, translated
from serving.structured.references import References, is_old
from ubatch.errors import shown

_BY_CASES = "use anyOf, with an option for each case"
REFUSED: Mapping[str, str] = {
    "not": "give what is allowed, by type, enum or pattern",
    **dict.fromkeys(("if", "then", "else"), _BY_CASES),
    **dict.fromkeys(("contains", "minContains", "maxContains"), "use prefixItems"),
    "uniqueItems": "leave it out, and check the answer",
    "propertyNames": "use patternProperties, with additionalProperties false",
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), _BY_CASES),
    "unevaluatedProperties": "use additionalProperties, with all properties in one place",
    "unevaluatedItems": "use items, with all prefixItems in one place",
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), "use $ref"),
}
"""Assertions that no grammar here can make -> what to do instead. Any other unknown keyword asserts nothing."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties", "unevaluatedItems"), (True, {})),
}
"""Values with which these assert nothing."""
_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_ONLY_WITH = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MOST_BOUND = 9e18  # the library writes bounds as integers of 64 bits
_MOST_COUNT = 2**31  # no output is as long
_MOST_OPTIONAL = 6  # properties whose number is counted by listing all choices
_NO_OBJECTS, _NO_NUMBERS = sorted(TYPES - {"object"}), sorted(TYPES - {"number"})
_PLACE_CHARACTERS = 200  # shown of a place in a schema

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


def normalised(schema: Any, *, closed: bool = False) -> tuple[Schema, bool]:
    """A JSON schema for llguidance, and whether strings may have any escapes.

    The library takes `"\\u0061"` for another name than `"a"` where an object may have names that are not listed; then
    only what must be escaped may be.

    Args:
        closed: objects whose schema does not say so have no other properties than those of the schema.

    Raises:
        RequestError: it is no schema, or has what cannot be enforced; the message names the keyword and its place.
    """
    walk = _Walk(schema, closed=closed)
    return walk.run(), not walk.has_open_names


class _Walk:
    """One pass over a document."""

    def __init__(self, document: Any, *, closed: bool) -> None:
        self._document = document
        self._closed = closed
        self._old = is_old(document)
        self._references = References(document)
        self._defs: dict[str, Schema] = {}
        self._names: dict[str, str] = {}
        self._waiting: deque[tuple[str, Any, str, str]] = deque()  # (name, schema, place, base): referred to
        self._one_ofs: list[dict[str, Any]] = []
        self._room = numeric.MAX_LISTED
        self.has_open_names = False

    def run(self) -> Schema:
        """The schema, with the definitions that it uses."""
        schema = self._schema(self._document, "", 0, "")
        while self._waiting:
            name, target, path, base = self._waiting.popleft()
            self._defs[name] = self._schema(target, path, 0, base)
        one_of = OneOf(lambda name: self._defs[name.removeprefix("#/$defs/")])
        separated = [one_of.separated(made["oneOf"]) for made in self._one_ofs]
        for made, options in zip(self._one_ofs, separated, strict=True):
            del made["oneOf"]
            self._beside(made, options)
        if not self._defs:
            return numeric.with_bounds(schema)
        root = {} if schema is True else {"enum": []} if isinstance(schema, bool) else schema
        return numeric.with_bounds({**root, "$defs": self._defs})

    @staticmethod
    def _beside(made: dict[str, Any], options: Sequence[Schema]) -> None:
        """Add `anyOf` to a schema that may have one."""
        if "anyOf" in made:
            made["allOf"] = [*made.get("allOf", ()), {"anyOf": options}]
        else:
            made["anyOf"] = options

    def _schema(self, given: Any, path: str, depth: int, base: str) -> Schema:
        if isinstance(given, bool):
            return given
        if not isinstance(given, Mapping):
            raise _wrong(path, f"a schema is an object or a boolean, not {shown(given)}.")
        if depth > MAX_DEPTH:
            raise RequestError(f"the schema has more than {MAX_DEPTH} levels. Put parts of it into $defs.")
        base = self._references.inside(given, base)
        if given.get("contains") is True or given.get("contains") == {}:
            given = _counting_items(given, path)
        self._check(given, path)
        if self._old and "$ref" in given:
            given = {"$ref": given["$ref"]}  # in these drafts, what is beside it means nothing
        out: dict[str, Any] = {}

        def inner(value: Any, place: str) -> Schema:
            return self._schema(value, f"{path}.{place}" if path else place, depth + 1, base)

        for keyword, value in given.items():
            self._take(out, keyword, value, given, path, inner, base)
        if self._closed and {"properties", "patternProperties"} & out.keys():
            out.setdefault("additionalProperties", False)
        self._finish(out, path)
        return out

    def _check(self, given: Mapping[str, Any], path: str) -> None:
        for keyword, instead in REFUSED.items():
            if keyword not in given or (keyword in _ONLY_WITH and _ONLY_WITH[keyword] not in given):
                continue
            if keyword in _UNEVALUATED and not _APPLICATORS & given.keys():
                continue  # then it means what `additionalProperties` or `items` does
            if not any(
                type(given[keyword]) is type(each) and given[keyword] == each for each in _NEUTRAL.get(keyword, ())
            ):
                raise _wrong(path, f"{keyword} is not supported: {instead}.", keyword)

    def _take(
        self,
        out: dict[str, Any],
        keyword: str,
        value: Any,
        given: Mapping[str, Any],
        path: str,
        inner: Callable[[Any, str], Schema],
        base: str,
    ) -> None:
        """Take one keyword; one that asserts nothing is left out."""
        match keyword:
            case "properties" | "patternProperties":
                members = _of(Mapping, value, path, keyword)
                rewrite = translated if keyword == "patternProperties" else str
                out[keyword] = {
                    _at(path, keyword, rewrite, name): inner(each, f"{keyword}.{name}")
                    for name, each in members.items()
                }
            case "unevaluatedProperties" | "unevaluatedItems":
                other = "additionalItems" if isinstance(given.get("items"), list) else _UNEVALUATED[keyword]
                if other not in given and not _APPLICATORS & given.keys():
                    out[_UNEVALUATED[keyword]] = inner(value, keyword)
            case "items" | "prefixItems" if isinstance(value, list):
                if keyword == "items" or not self._old:
                    out["prefixItems"] = [inner(each, f"{keyword}.{place}") for place, each in enumerate(value)]
                if keyword == "items" and "additionalItems" in given:
                    out["items"] = inner(given["additionalItems"], "additionalItems")
            case "additionalProperties" | "items":
                out[keyword] = inner(value, keyword)
            case "allOf" | "anyOf" | "oneOf":
                options = _of(list, value, path, keyword)
                out[keyword] = [inner(each, f"{keyword}.{place}") for place, each in enumerate(options)]
                if keyword == "oneOf":
                    self._one_ofs.append(out)
            case "$ref":
                out["$ref"] = self._reference(value, path, base)
            case "type":
                out["type"] = value
            case "const" | "enum":
                _check_numbers(value, path, keyword)
                out[keyword] = value if keyword == "const" else _of(list, value, path, keyword)
            case "required":
                out[keyword] = _of(list, value, path, keyword)
            case "pattern":
                out["pattern"] = _at(path, keyword, translated, _of(str, value, path, keyword))
            case "format":
                self._format(out, value, path)
            case _ if keyword in _COUNTS:
                out[keyword] = _count(value, path, keyword)
            case "multipleOf":
                if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                    raise _wrong(path, f"multipleOf must be a number above 0, not {shown(value)}.", keyword)
                out[keyword] = value
            case _ if keyword in numeric.INWARD:
                self._bound(out, keyword, value, given, path)

    def _reference(self, value: Any, path: str, base: str) -> str:
        reference = _of(str, value, path, "$ref")
        url, target, there = _at(path, "$ref", lambda each: self._references.resolve(each, base), reference)
        name = self._names.get(url)
        if name is None:
            name = self._names[url] = str(len(self._names))
            self._waiting.append((name, target, f"{path}.$ref({value})" if path else f"$ref({value})", there))
        return f"#/$defs/{name}"

    def _format(self, out: dict[str, Any], value: Any, path: str) -> None:
        if value in REFUSED_FORMATS:
            raise _wrong(path, f"format {value!r} is not supported: leave it out, and check the answer.", "format")
        if value in OWN_FORMATS:
            out["allOf"] = [*out.get("allOf", ()), {"pattern": pattern_of(value)}]
        elif value in LIBRARY_FORMATS:
            out["format"] = value

    def _bound(self, out: dict[str, Any], keyword: str, value: Any, given: Mapping[str, Any], path: str) -> None:
        if isinstance(value, bool):  # draft 4: whether `minimum` itself is excluded
            other = "minimum" if keyword == "exclusiveMinimum" else "maximum"
            if not value or other not in given:
                return
            value = given[other]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(path, f"{keyword} must be a number, not {shown(value)}.", keyword)
        inward = numeric.INWARD[keyword]
        if isinstance(value, int) and numeric.MOST_EXACT < abs(value) <= _MOST_BOUND:
            near = float(value)
            outside = near < value if inward > 0 else near > value
            value = math.nextafter(near, inward) if outside else near
        if abs(value) > _MOST_BOUND:
            if (value > 0) == (inward > 0):
                raise _wrong(path, f"{keyword} must be within ±{_MOST_BOUND:.0e}, not {shown(value)}.", keyword)
            value = math.copysign(_MOST_BOUND, value)
        out[keyword] = value

    def _finish(self, out: dict[str, Any], path: str) -> None:
        """Look at what keywords mean together."""
        self.has_open_names |= bool(out.get("properties")) and out.get("additionalProperties") is not False
        if "multipleOf" in out:
            self._multiples(out, path)
        self._count_optional(out)
        least, required = out.get("minProperties", 0), len(set(map(str, out.get("required", ()))))
        if least <= required:
            out.pop("minProperties", None)
        elif least > required + 1:
            what = "minProperties is above the number of required properties by more than one, which cannot be counted"
            raise _wrong(path, f"{what}, because a name may come twice. List them in required.", "minProperties")

    def _multiples(self, out: dict[str, Any], path: str) -> None:
        """Write `multipleOf` as what floats cannot tell otherwise; see `numeric`."""
        step = out["multipleOf"]
        if numeric.is_exact(step):
            if (within := numeric.exact_bounds(step)) is not None:
                least, most = within
                out["minimum"] = max(out.get("minimum", least), least)
                out["maximum"] = min(out.get("maximum", most), most)
            if coarser := numeric.coarser(step):
                self._beside(out, [{"multipleOf": each} for each in (step, *coarser)])
            return
        given = [out["const"]] if "const" in out else out.get("enum")
        if given is not None:
            out.pop("const", None)
            out["enum"] = numeric.filtered(given, step)
        else:
            found = _at(path, "multipleOf", lambda asked: numeric.listed(asked, self._room), out)
            self._room -= len(found)
            self._beside(out, [{"enum": found}, {"type": _NO_NUMBERS}])
        del out["multipleOf"]

    def _count_optional(self, out: dict[str, Any]) -> None:
        """Write a number of optional properties, if they are few, as the choices that there are."""
        names = {*map(str, out.get("required", ()))}
        optional = [name for name in out.get("properties", ()) if name not in names]
        counted = {"minProperties", "maxProperties"} & out.keys()
        closed = out.get("additionalProperties") is False and "patternProperties" not in out
        if not counted or not closed or not 0 < len(optional) <= _MOST_OPTIONAL:
            return
        least, most = out.pop("minProperties", 0), out.pop("maxProperties", math.inf)
        choices = [
            {"required": list(chosen), "properties": {name: False for name in optional if name not in chosen}}
            for count in range(len(optional) + 1)
            if least <= count + len(names) <= most
            for chosen in combinations(optional, count)
        ]
        self._beside(out, [{"type": _NO_OBJECTS}, *({"type": "object", **choice} for choice in choices)])


def _check_numbers(value: Any, path: str, keyword: str, depth: int = 1) -> None:
    """Refuse constants that the library would round."""
    if depth > MAX_DEPTH:
        raise _wrong(path, f"the value has more than {MAX_DEPTH} levels.", keyword)
    if isinstance(value, int | float) and abs(value) > numeric.MOST_EXACT:
        raise _wrong(path, f"numbers beyond ±2^53 are not supported, as {shown(value)}. Use a text.", keyword)
    if isinstance(value, list | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            _check_numbers(inner, path, keyword, depth + 1)


def _counting_items(given: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """A schema whose lists contain some of anything, with the number of items for it."""
    least = _count(given.get("minContains", 1), path, "minContains")
    most = _count(given.get("maxContains", _MOST_COUNT), path, "maxContains")
    rest = {name: value for name, value in given.items() if name not in ("contains", "minContains", "maxContains")}
    return {
        **rest,
        "minItems": max(_count(given.get("minItems", 0), path, "minItems"), least),
        "maxItems": min(_count(given.get("maxItems", _MOST_COUNT), path, "maxItems"), most),
    }


def _count(value: Any, path: str, keyword: str) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < 0:
        raise _wrong(path, f"{keyword} must be an integer from 0, not {shown(value)}.", keyword)
    return min(int(value), _MOST_COUNT)


def _of(kind: type, value: Any, path: str, keyword: str) -> Any:
    """The value of a keyword, which must be an object, a list or a text."""
    if not isinstance(value, kind):
        told = "a list" if kind is list else "a text" if kind is str else "an object"
        raise _wrong(path, f"{keyword} must be {told}, not {shown(value)}.", keyword)
    return value


def _at(path: str, keyword: str, make: Callable[[_Given], _Made], value: _Given) -> _Made:
    """`make(value)`, with the place in the message if it is refused."""
    try:
        return make(value)
    except RequestError as error:
        raise _wrong(path, str(error), keyword) from error


def _wrong(path: str, message: str, keyword: str = "") -> RequestError:
    place = ".".join(part for part in (path, keyword) if part)
    if len(place) > _PLACE_CHARACTERS:
        place = f"...{place[-_PLACE_CHARACTERS:]}"
    return RequestError(f"{place or 'the schema'}: {message}")
