"""Long lists of an answer, stored as encoded JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

__all__ = ["JsonLists"]


class JsonLists:
    """Growing lists stored as encoded JSON: a fraction of the objects' memory, and cheap to put into the answer."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lists = {name: bytearray() for name in names}

    def __bool__(self) -> bool:
        return any(self._lists.values())

    def add(self, items: Mapping[str, Sequence[Any]]) -> None:
        """Append items to each list. A NaN or infinity becomes null."""
        for name, several in items.items():
            self._append(name, msgspec.json.encode(several)[1:-1])

    def extend(self, other: JsonLists) -> None:
        """Append the lists of another `JsonLists`."""
        for name, encoded in other._lists.items():
            self._append(name, encoded)

    def raw(self) -> dict[str, msgspec.Raw]:
        """The lists, for `msgspec.json.encode`."""
        return {name: msgspec.Raw(b"[" + bytes(encoded) + b"]") for name, encoded in self._lists.items()}

    def _append(self, name: str, encoded: bytes | bytearray) -> None:
        known = self._lists[name]
        if known and encoded:
            known += b","
        known += encoded
