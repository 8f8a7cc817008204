"""Where a JSON schema's `$ref` points to. Nothing is ever fetched: a reference leads into the same document."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from model_runner import RequestError
from ubatch.errors import shown

_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are no schemas, so that nothing in them has a name."""
_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords with a schema for each name; the names are no keywords."""
_OLD = ("draft-03", "draft-04", "draft-06", "draft-07")


def is_old(document: Any) -> bool:
    """Whether a document follows a draft before 2019-09, where what is beside `$ref` means nothing."""
    return isinstance(document, Mapping) and any(name in str(document.get("$schema")) for name in _OLD)


class References:
    """The places of a document that references may name: those with `$id`, those with `$anchor`, and JSON pointers."""

    def __init__(self, document: Any) -> None:
        oldest = isinstance(document, Mapping) and any(name in str(document.get("$schema")) for name in _OLD[:2])
        self._id = "id" if oldest else "$id"
        self._old = is_old(document)
        self._places: dict[str, tuple[Any, str]] = {"": (document, "")}
        for name, schema, base in self._named(document, ""):
            self._places.setdefault(name, (schema, base))

    def inside(self, schema: Mapping[str, Any], base: str) -> str:
        """The base in a schema, whose own name may change it, from the base where it stands."""
        own = schema.get(self._id)
        if not isinstance(own, str) or (self._old and "$ref" in schema):
            return base
        return urldefrag(_joined(base, own))[0]

    def resolve(self, reference: str, base: str) -> tuple[str, Any, str]:
        """What a reference means in a schema: (its name, the schema there, the base where that stands).

        Args:
            base: in the schema; see `inside`.

        Raises:
            RequestError: it leads out of the document, or nowhere.
        """
        url = _joined(base, reference)
        if url in self._places:
            return (url, *self._places[url])
        document, pointer = urldefrag(url)
        if document not in self._places or (pointer and not pointer.startswith("/")):
            raise RequestError(
                f"$ref {shown(reference)} is nowhere in the schema; other documents are never fetched. Put what it "
                f"means into $defs."
            )
        schema, base = self._places[document]
        for part in unquote(pointer).split("/")[1:]:
            if isinstance(schema, Mapping):
                base = self.inside(schema, base)
            schema = _member(schema, part.replace("~1", "/").replace("~0", "~"))
            if schema is None:
                raise RequestError(f"$ref {shown(reference)} is nowhere in the schema.")
        return url, schema, base

    def _named(self, schema: Any, base: str) -> Iterator[tuple[str, Any, str]]:
        """(address, schema, base where it stands) of all that a document names by `$id` or `$anchor`."""
        if isinstance(schema, list):
            for each in schema:
                yield from self._named(each, base)
        if not isinstance(schema, Mapping):
            return
        within = self.inside(schema, base)
        if isinstance(own := schema.get(self._id), str) and not (self._old and "$ref" in schema):
            yield _joined(base, own).removesuffix("#"), schema, base
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                yield f"{within}#{anchor}", schema, base
        for keyword, value in schema.items():
            if keyword in _BY_NAME and isinstance(value, Mapping):
                for each in value.values():
                    yield from self._named(each, within)
            elif keyword not in _VALUES:
                yield from self._named(value, within)


def _joined(base: str, reference: str) -> str:
    """What a reference names; a fragment alone also where the base is no path, as in `urn:uuid:...`."""
    return urldefrag(base)[0] + reference if reference.startswith("#") else urljoin(base, reference)


def _member(schema: Any, part: str) -> Any:
    if isinstance(schema, Mapping):
        return schema.get(part)
    if isinstance(schema, list) and part.isdecimal() and int(part) < len(schema):
        return schema[int(part)]
    return None
