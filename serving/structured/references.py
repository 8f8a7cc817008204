"""Where a JSON schema's `$ref` points to. Nothing is ever fetched: a reference leads into the same document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from model_runner import RequestError
from ubatch.errors import shown


class References:
    """The places of a document that references may name: those with `$id`, those with `$anchor`, and JSON pointers."""

    def __init__(self, document: Any) -> None:
        self._places: dict[str, tuple[Any, str]] = {"": (document, "")}
        for base, schema in _identified(document, ""):
            self._places.setdefault(base, (schema, urldefrag(base)[0]))

    def resolve(self, reference: str, base: str) -> tuple[str, Any, str]:
        """What a reference means in a schema whose base is `base`: (its name, the schema there, the base there).

        Raises:
            RequestError: it leads out of the document, or nowhere.
        """
        url = urljoin(base, reference)
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
            schema = _inside(schema, part.replace("~1", "/").replace("~0", "~"))
            if schema is None:
                raise RequestError(f"$ref {shown(reference)} is nowhere in the schema.")
            if isinstance(schema, Mapping) and isinstance(schema.get("$id"), str):
                base = urldefrag(urljoin(base, schema["$id"]))[0]
        return url, schema, base


def _inside(schema: Any, part: str) -> Any:
    if isinstance(schema, Mapping):
        return schema.get(part)
    if isinstance(schema, list) and part.isdecimal() and int(part) < len(schema):
        return schema[int(part)]
    return None


def _identified(schema: Any, base: str) -> Iterator[tuple[str, Any]]:
    """(address, schema) of all that a document names by `$id` or `$anchor`."""
    if isinstance(schema, Mapping):
        if isinstance(own := schema.get("$id"), str):
            base = urljoin(base, own)
            yield urldefrag(base)[0] if base.endswith("#") else base, schema
        if isinstance(anchor := schema.get("$anchor"), str):
            yield f"{urldefrag(base)[0]}#{anchor}", schema
    if isinstance(schema, Mapping | list):
        for inner in schema.values() if isinstance(schema, Mapping) else schema:
            yield from _identified(inner, base)
