"""Snapshots of recurrent states: which slots of the pool are free, promised to a step, or owned by a node of the tree.

    free ── take ──> promised to a step that is in flight ── give ──> a node's ── drop, or `take` by others ──> free
                                                          └─ put_back ──> free

A node of the prefix cache owns at most one snapshot, of the states after exactly the tokens that end with the node.
Snapshots are given up one by one, the least recently used first; a node without one keeps its pages.

One that a step begins with needs no protection: it is chosen, and its slot taken for another, in the same plan at the
earliest, and a step restores before its forward and keeps after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from attention import KVCacheError
from serving.scheduler.radix_node import RadixNode

SNAPSHOT_INTERVAL = 256
"""Tokens after which a running request's states are kept again, at the next page border that a step ends with."""
SNAPSHOT_WORTH = 32
"""Least tokens that a snapshot must save to cut a prompt for it (or one page, if larger): a cut costs a step."""


class Snapshots:
    """The slots of `count` snapshots; 0 for a model without recurrent states."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._free = list(range(count))
        self._promised: set[int] = set()
        self._owners: OrderedDict[int, RadixNode] = OrderedDict()  # least recently used first

    def take(self) -> int | None:
        """A slot for a step to write: a free one, or else the least recently used; None if all are promised."""
        if self._free:
            number = self._free.pop()
        elif self._owners:
            number, owner = self._owners.popitem(last=False)
            owner.snapshot = None
        else:
            return None
        self._promised.add(number)
        return number

    def give(self, number: int, owner: RadixNode) -> None:
        """A promised slot is written: it becomes the owner's, or free if that has a snapshot already."""
        if owner.snapshot is not None:
            self.put_back(number)
            return
        self._promised.remove(number)
        owner.snapshot = number
        self._owners[number] = owner

    def put_back(self, number: int) -> None:
        """Nobody needs what a promised slot gets."""
        self._promised.remove(number)
        self._free.append(number)

    def use(self, owner: RadixNode) -> None:
        """A request begins with the owner's snapshot, if it has one: it is the most recently used now."""
        if owner.snapshot is not None:
            self._owners.move_to_end(owner.snapshot)

    def drop(self, owner: RadixNode) -> None:
        """The owner is evicted, or no longer ends where its snapshot was kept."""
        if owner.snapshot is not None:
            del self._owners[owner.snapshot]
            self._free.append(owner.snapshot)
            owner.snapshot = None

    def check(self, owners: Iterable[RadixNode], *, idle: bool = False) -> None:
        """Check that free + promised + owned == all, none is two of these, and `owners` own what is noted.

        Args:
            idle: also require that none is promised.
        """
        own = {owner.snapshot: owner for owner in owners if owner.snapshot is not None}
        every = [*self._free, *self._promised, *self._owners]
        if sorted(every) != list(range(self.count)) or own != self._owners:
            raise KVCacheError(
                f"snapshots are not conserved: {len(self._free)} free + {len(self._promised)} promised + "
                f"{len(self._owners)} of {len(own)} nodes != {self.count}."
            )
        if idle and self._promised:
            raise KVCacheError(f"{len(self._promised)} snapshots are promised although nothing runs.")
