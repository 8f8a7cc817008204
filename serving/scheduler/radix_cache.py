"""The prefix cache: a radix tree of whole pages that maps prefixes of sequences to the KV blocks that hold them.

    root ── [A B] ── [C]          an edge is one node: several pages of tokens and the blocks that hold them
                └─── [D E F]      the children of a node differ in their first page

A *match* is the longest path of whole pages that a sequence begins with; a node that matches in part is split.
A *lock* on a node protects its whole path from eviction: running requests read it. Unlocked pages may be evicted, the
least recently used leaf first, page by page from its end; a parent becomes a leaf when its last child is gone.

*Snapshots* of recurrent states lie in the slots of a pool, which are free, promised to a step, or owned by a node:

    free ── take ──> promised to a step that is in flight ── give ──> a node's ── drop, or `take` by others ──> free
                                                          └─ put_back ──> free

A node owns at most one snapshot, of the states after exactly the tokens that end with the node; a split leaves it with
the part that ends where it did. They are given up one by one, the least recently used first; a node without one keeps
its pages. One that a step begins with needs no protection: it is chosen, and its slot taken for another, in the same
plan at the earliest, and a step restores before its forward and keeps after it.

The tree neither allocates nor frees blocks. It owns inserted blocks until `evict` returns them.
Time is a counter of calls, so evictions do not depend on the speed of the machine.

Source: SGLang's RadixAttention (2024).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from attention import KVCacheError

SNAPSHOT_INTERVAL = 256
"""Tokens after which a running request's states are kept again, at the next page border that a step ends with."""
SNAPSHOT_WORTH = 32
"""Least tokens that a snapshot must save to cut a prompt for it (or one page, if larger): a cut costs a step."""


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two sequences, in tokens."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


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


def _path(node: RadixNode | None, root: RadixNode) -> Iterator[RadixNode]:
    """A node and those above it, but the root; of one that was evicted, the node alone."""
    while node is not None and node is not root:
        yield node
        node = node.parent


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


@dataclass(frozen=True)
class PrefixMatch:
    """The cached prefix of a sequence. Valid until the next eviction; lock `node` to keep it.

    Attributes:
        node: the end of the path; the root if nothing matches.
        blocks: blocks of the path's pages, in order.
        pages_beyond: pages of the sequence after these, in the cache, but without a snapshot to go on from.
    """

    node: RadixNode
    blocks: tuple[int, ...]
    pages_beyond: int = 0


@dataclass(frozen=True)
class Insertion:
    """The result of an insertion.

    Attributes:
        blocks: blocks of the path's pages; the sequence must use these from now on.
        duplicates: given blocks that the tree did not take over, because it has blocks with the same contents.
    """

    node: RadixNode
    blocks: tuple[int, ...]
    duplicates: tuple[int, ...]


class RadixCache:
    """The tree; the module's text describes it.

    Attributes:
        root: the empty prefix.
        num_cached: blocks that the tree owns.
        num_locked: owned blocks that are locked.
        snapshots: which slots of snapshots are free, or whose.
    """

    def __init__(self, block_size: int, num_snapshots: int = 0) -> None:
        self.block_size = block_size
        self.snapshots = Snapshots(num_snapshots)
        self._clock = 0
        self._serial = 0
        self.root = RadixNode(None, [], [], 0)
        self._num_nodes = 0
        self.num_cached = 0
        self.num_locked = 0
        # Has every unlocked leaf with its current `last_used`, and outdated entries, which `evict` skips.
        self._heap: list[tuple[int, int, RadixNode]] = []

    @property
    def num_evictable(self) -> int:
        """Owned blocks that `evict` could return."""
        return self.num_cached - self.num_locked

    def match(self, tokens: Sequence[int], stop: int | None = None) -> PrefixMatch:
        """The longest cached prefix of `tokens[:stop]`, in whole pages. Nothing is locked."""
        self._clock += 1
        node, blocks = self._walk(tokens, len(tokens) if stop is None else stop)
        self._note_evictable(node)
        return PrefixMatch(node, tuple(blocks))

    def match_with_snapshot(self, tokens: Sequence[int], stop: int | None = None) -> PrefixMatch:
        """The longest cached prefix of `tokens[:stop]` that ends with a snapshot."""
        found = self.match(tokens, stop)
        node, count = found.node, len(found.blocks)
        while node.snapshot is None and node.parent is not None:
            count -= len(node.blocks)
            node = node.parent
        return PrefixMatch(node, found.blocks[:count], len(found.blocks) - count)

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> Insertion:
        """Take over the blocks of a sequence, except those of pages that are in the tree already.

        Args:
            tokens: token ids of whole pages whose keys and values are written.
            blocks: one per page; for matched pages, the tree's own.

        Raises:
            KVCacheError: the number of tokens is not blocks x block size.
        """
        if len(tokens) != len(blocks) * self.block_size:
            raise KVCacheError(
                f"{len(tokens)} tokens do not fill {len(blocks)} blocks of {self.block_size}; insert whole pages only."
            )
        self._clock += 1
        node, path = self._walk(tokens, len(tokens))
        known = len(path)
        if known < len(blocks):
            node = self._add_leaf(node, list(tokens[known * self.block_size :]), list(blocks[known:]))
            path += node.blocks
        self._note_evictable(node)
        duplicates = tuple(given for given, own in zip(blocks[:known], path, strict=False) if given != own)
        return Insertion(node, tuple(path), duplicates)

    def lock(self, node: RadixNode) -> None:
        """Protect a node and the path to it from eviction."""
        for step in _path(node, self.root):
            if step.locks == 0:
                self.num_locked += len(step.blocks)
            step.locks += 1

    def unlock(self, node: RadixNode) -> None:
        """Remove one lock from a node and the path to it."""
        for step in _path(node, self.root):
            if step.locks == 0:
                raise KVCacheError("a node of the prefix cache was unlocked more often than locked.")
            step.locks -= 1
            if step.locks == 0:
                self.num_locked -= len(step.blocks)
                self._note_evictable(step)

    def num_unlocked(self, node: RadixNode) -> int:
        """Number of evictable blocks on the path to a node: those that `lock` would protect."""
        unlocked = takewhile(lambda step: step.locks == 0, _path(node, self.root))  # above a locked node all are
        return sum(len(step.blocks) for step in unlocked)

    def evict(self, num_blocks: int) -> list[int]:
        """Evict and return up to `num_blocks` blocks, the least recently used first; fewer if the rest is locked."""
        evicted: list[int] = []
        while self._heap and len(evicted) < num_blocks:
            last_used, _, node = heapq.heappop(self._heap)
            if not self._is_evictable(node, last_used):
                continue
            keep = max(0, len(node.blocks) - (num_blocks - len(evicted)))
            evicted += reversed(node.blocks[keep:])
            self.num_cached -= len(node.blocks) - keep
            self.snapshots.drop(node)
            if keep:
                del node.blocks[keep:], node.tokens[keep * self.block_size :]
                self._note_evictable(node)
            else:
                self._remove(node)
        return evicted

    def blocks(self) -> Iterator[int]:
        """Every block that the tree owns."""
        return (block for node in self._nodes() for block in node.blocks)

    def check(self, *, idle: bool = False) -> None:
        """Check the tree: pages match their keys, locks and counts are right, every unlocked leaf can be evicted, and
        snapshots are conserved; with `idle`, that no step will still write one."""
        waiting = {id(node) for last_used, _, node in self._heap if self._is_evictable(node, last_used)}
        nodes = list(self._nodes())
        for node in nodes:
            size = self.block_size
            if not node.blocks or len(node.tokens) != len(node.blocks) * size:
                raise KVCacheError(f"prefix cache: a node has {len(node.tokens)} tokens in {len(node.blocks)} pages.")
            for key, child in node.children.items():
                if child.parent is not node or key != tuple(child.tokens[:size]):
                    raise KVCacheError(f"prefix cache: a child is not where its first page {key} says.")
            if node.locks < sum(child.locks for child in node.children.values()):
                raise KVCacheError(f"prefix cache: a node with {node.locks} locks has children with more.")
            if not node.children and node.locks == 0 and id(node) not in waiting:
                raise KVCacheError("prefix cache: an unlocked leaf could never be evicted.")
        self.snapshots.check(nodes, idle=idle)
        blocks = list(self.blocks())
        if len(set(blocks)) != len(blocks):
            raise KVCacheError("prefix cache: a block is in it twice.")
        locked = sum(len(node.blocks) for node in nodes if node.locks)
        if (len(nodes), len(blocks), locked) != (self._num_nodes, self.num_cached, self.num_locked):
            raise KVCacheError(
                f"prefix cache: {len(nodes)} nodes, {len(blocks)} blocks, {locked} locked, but it counted "
                f"{self._num_nodes}, {self.num_cached}, {self.num_locked}."
            )

    # -- the tree -----------------------------------------------------------------------------------------------

    def _walk(self, tokens: Sequence[int], stop: int) -> tuple[RadixNode, list[int]]:
        """Follow `tokens[:stop]` by whole pages; splits a node that matches in part, updates the path's `last_used`."""
        size, node, start = self.block_size, self.root, 0
        blocks: list[int] = []
        while start + size <= stop:
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            shared = self._shared_pages(child, list(tokens[start : min(stop, start + len(child.tokens))]))
            left = shared < len(child.blocks)
            node = self._split(child, shared) if left else child
            node.last_used = self._clock
            blocks += node.blocks
            start += shared * size
            if left:
                break
        return node, blocks

    def _shared_pages(self, node: RadixNode, tokens: list[int]) -> int:
        """How many of the node's pages `tokens` begins with; at least one, as the first page was found by its key."""
        if tokens == node.tokens:
            return len(node.blocks)
        return common_prefix(tokens, node.tokens) // self.block_size

    def _split(self, node: RadixNode, pages: int) -> RadixNode:
        """Move the node's first pages into a new parent node, which gets the same number of locks; returns it."""
        parent, cut = node.parent, pages * self.block_size
        if parent is None:
            raise KVCacheError("the root of the prefix cache has no pages to split.")
        upper = RadixNode(parent, node.tokens[:cut], node.blocks[:pages], node.last_used)
        upper.locks = node.locks
        parent.children[self._key(upper)] = upper
        node.parent, node.tokens, node.blocks = upper, node.tokens[cut:], node.blocks[pages:]
        upper.children[self._key(node)] = node
        self._num_nodes += 1
        return upper

    def _add_leaf(self, parent: RadixNode, tokens: list[int], blocks: list[int]) -> RadixNode:
        leaf = RadixNode(parent, tokens, blocks, self._clock)
        parent.children[self._key(leaf)] = leaf
        self._num_nodes += 1
        self.num_cached += len(blocks)
        return leaf

    def _remove(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        if parent is None:
            raise KVCacheError("the root of the prefix cache cannot be evicted.")
        del parent.children[self._key(leaf)]
        leaf.parent = None
        self._num_nodes -= 1
        self._note_evictable(parent)

    def _key(self, node: RadixNode) -> tuple[int, ...]:
        return tuple(node.tokens[: self.block_size])

    def _nodes(self) -> Iterator[RadixNode]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    # -- least recently used ------------------------------------------------------------------------------------

    def _is_evictable(self, node: RadixNode, last_used: int) -> bool:
        return node.last_used == last_used and node.locks == 0 and not node.children and node.parent is not None

    def _note_evictable(self, node: RadixNode) -> None:
        """Add the node to the eviction heap if it is an unlocked leaf; removes outdated entries if there are many."""
        if node.locks or node.children or node.parent is None:
            return
        self._serial += 1
        heapq.heappush(self._heap, (node.last_used, self._serial, node))
        if len(self._heap) > 64 + 4 * self._num_nodes:
            kept = {id(entry[2]): entry for entry in self._heap if self._is_evictable(entry[2], entry[0])}
            self._heap = list(kept.values())
            heapq.heapify(self._heap)
