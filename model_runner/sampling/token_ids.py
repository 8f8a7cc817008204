"""The tokens that a request allows: up to a whole vocabulary, so they are stored and sent in few bytes.

sent     the ids, 8 bytes each, or one bit for every id up to the highest: whichever is shorter
stored   `[n]` int64; an engine stores equal messages once, for all outputs of a request body
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

_IDS, _BITS = b"i", b"b"
_SHOWN = 16


class TokenIds(Sequence[int]):
    """Different token ids, 0 or more, in their given order; at least one.

    It reads like a tuple of integers. It equals another one with the same tokens in any order. Logs show the first 16.

    Args:
        ids: `[n]` int64, all different; do not change it afterwards.
    """

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self.ids = ids
        self.highest = int(ids.max())

    @cached_property
    def packed(self) -> bytes:
        """The bytes to send; the order is lost if they are sent as bits."""
        if 8 * len(self.ids) <= self.highest // 8 + 1:
            return _IDS + self.ids.astype("<i8").tobytes()
        there = np.zeros(self.highest + 1, np.bool_)
        there[self.ids] = True
        return _BITS + np.packbits(there, bitorder="little").tobytes()

    @staticmethod
    def unpack(packed: bytes) -> TokenIds:
        """The ids from their `packed` bytes."""
        found = _kept.get(packed)
        if found is None:
            kind, data = packed[:1], packed[1:]
            if kind == _IDS:
                ids = np.frombuffer(data, "<i8").astype(np.int64)
            else:
                ids = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")).astype(np.int64)
            found = _kept[packed] = TokenIds(ids)
        return found

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self.ids[index].tolist()) if isinstance(index, slice) else int(self.ids[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and bool((self.ids == token).any())

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, TokenIds):
            return self is other or np.array_equal(self._sorted, other._sorted)
        return isinstance(other, tuple) and len(other) == len(self) and set(other) == set(self)

    def __hash__(self) -> int:
        return hash(self._sorted.tobytes())

    def __repr__(self) -> str:
        return short_repr(self)

    @cached_property
    def _sorted(self) -> NDArray[np.int64]:
        return np.sort(self.ids)


def short_repr(tokens: Sequence[int]) -> str:
    """Tokens as logs show them: the first 16, and how many there are."""
    if len(tokens) <= _SHOWN:
        return repr(tuple(tokens))
    return f"({', '.join(map(str, tokens[:_SHOWN]))}, ... {len(tokens)} tokens)"


_kept: WeakValueDictionary[bytes, TokenIds] = WeakValueDictionary()
