"""A node of the prefix cache: what the tree and its snapshots share."""

from __future__ import annotations


class RadixNode:
    """Some pages of a sequence and their blocks. Only `RadixCache` changes it.

    Attributes:
        parent: None for the root, and for an evicted node.
        children: first page -> child.
        locks: how many requests use this node or one below it.
        last_used: when it was last matched or inserted, by the tree's clock.
        snapshot: of the recurrent states after its last token; None if there is none.
    """

    __slots__ = ("blocks", "children", "last_used", "locks", "parent", "snapshot", "tokens")

    def __init__(self, parent: RadixNode | None, tokens: list[int], blocks: list[int], last_used: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[tuple[int, ...], RadixNode] = {}
        self.locks = 0
        self.last_used = last_used
        self.snapshot: int | None = None
