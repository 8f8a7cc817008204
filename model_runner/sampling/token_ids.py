"""Which tokens a request allows: up to a whole vocabulary, so they are kept and sent in few bytes.

sent   the ids, 8 bytes each, or a bit for every id up to the highest: whichever is shorter
kept   `[n]` int64; engines keep those that were sent in the same bytes once, for all outputs of a body
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

__all__ = ["TokenIds"]

_IDS, _BITS = b"i", b"b"
_SHOWN = 16


class TokenIds(Sequence[int]):
    """Different token ids, 0 or more, in the order that they were given in; at least one.

    To read it is a tuple of integers. It equals what has the same tokens, in whatever order. Logs show the first few.

    Args:
        ids: `[n]` int64, all different; not to be changed afterwards.
    """

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self.ids = ids
        self.highest = int(ids.max())

    @cached_property
    def packed(self) -> bytes:
        """As it is sent; of many the order is lost."""
        if 8 * len(self.ids) <= self.highest // 8 + 1:
            return _IDS + self.ids.astype("<i8").tobytes()
        there = np.zeros(self.highest + 1, np.bool_)
        there[self.ids] = True
        return _BITS + np.packbits(there, bitorder="little").tobytes()

    @staticmethod
    def unpack(packed: bytes) -> TokenIds:
        """From `packed`."""
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
        if len(self) <= _SHOWN:
            return repr(tuple(self))
        return f"({', '.join(map(str, self[:_SHOWN]))}, ... {len(self)} tokens)"

    @cached_property
    def _sorted(self) -> NDArray[np.int64]:
        return np.sort(self.ids)


_kept: WeakValueDictionary[bytes, TokenIds] = WeakValueDictionary()
