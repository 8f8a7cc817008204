"""The prefix cache's tree, against a dictionary from every cached beginning to its block."""

import random

import pytest

from attention import KVCacheError
from serving.scheduler import PrefixMatch, RadixCache, RadixNode


def pages(*numbers: int, size: int = 2) -> list[int]:
    """Tokens of pages that are told apart by a number."""
    return [number * 10 + offset for number in numbers for offset in range(size)]


def test_a_match_is_whole_pages_of_the_longest_common_beginning() -> None:
    tree = RadixCache(2)
    tree.insert(pages(1, 2, 3), [10, 11, 12])
    assert tree.match(pages(1, 2, 3, 4)).blocks == (10, 11, 12)
    assert tree.match([*pages(1), 20]).blocks == (10,)
    assert tree.match([*pages(1), 20, 99]).blocks == (10,)
    assert tree.match(pages(2, 3)).blocks == ()
    assert tree.match([]).blocks == ()
    assert tree.match([10]).node is tree.root
    tree.check()


def test_a_node_is_split_where_sequences_part() -> None:
    tree = RadixCache(2)
    long = tree.insert(pages(1, 2, 3), [10, 11, 12])
    tree.lock(long.node)
    other = tree.insert(pages(1, 2, 5), [10, 11, 15])
    assert other.blocks == (10, 11, 15)
    assert other.duplicates == ()
    assert tree.match(pages(1, 2, 3)).blocks == (10, 11, 12)
    assert (tree.num_cached, tree.num_locked) == (4, 3)  # the lock holds both halves
    tree.check()
    tree.unlock(long.node)
    assert tree.num_locked == 0
    tree.check()


def test_what_the_tree_has_already_comes_back_as_duplicate() -> None:
    tree = RadixCache(2)
    tree.insert(pages(1, 2), [10, 11])
    inserted = tree.insert(pages(1, 2, 3), [10, 21, 22])
    assert inserted.blocks == (10, 11, 22)
    assert inserted.duplicates == (21,)
    assert tree.num_cached == 3


def test_the_least_recently_used_leaf_goes_first_and_its_end_before_its_begin() -> None:
    tree = RadixCache(2)
    tree.insert(pages(1, 2, 3), [10, 11, 12])
    tree.insert(pages(5, 6), [15, 16])
    tree.match(pages(1, 2, 3))
    assert tree.evict(1) == [16]
    assert tree.match(pages(5, 6)).blocks == (15,)
    assert tree.evict(2) == [12, 11]  # now the other one is older
    tree.check()
    assert sorted(tree.evict(99)) == [10, 15]
    assert tree.num_cached == 0


def test_a_parent_can_be_evicted_once_its_children_are_gone() -> None:
    tree = RadixCache(2)
    tree.insert(pages(1, 2), [10, 11])
    tree.insert(pages(1, 3), [10, 12])
    assert tree.evict(2) == [11, 12]
    assert tree.evict(1) == [10]
    tree.check()


def test_what_is_locked_stays_and_frees_nothing_above_it() -> None:
    tree = RadixCache(2)
    tree.insert(pages(1, 2), [10, 11])
    below = tree.insert(pages(1, 2, 3), [10, 11, 12]).node
    tree.lock(tree.match(pages(1, 2)).node)
    assert tree.num_unlocked(below) == 1
    assert tree.evict(9) == [12]
    assert tree.evict(9) == []
    assert tree.num_evictable == 0


def test_a_snapshot_is_of_what_ends_with_its_node_and_the_oldest_goes_first() -> None:
    tree = RadixCache(2, num_snapshots=2)
    snapshots = tree.snapshots

    def keep(node: RadixNode) -> int:
        number = snapshots.take()
        assert number is not None
        snapshots.give(number, node)
        return number

    long = tree.insert(pages(1, 2, 3), [10, 11, 12]).node
    first = keep(long)
    other = tree.insert(pages(1, 5), [10, 15]).node  # splits the first node
    second = keep(other)
    assert tree.match_with_snapshot(pages(1, 2, 3, 4)) == PrefixMatch(long, (10, 11, 12))
    assert tree.match_with_snapshot(pages(1, 2)) == PrefixMatch(tree.root, (), 2)
    snapshots.use(long)
    assert [snapshots.take(), snapshots.take(), snapshots.take()] == [second, first, None]
    assert tree.match_with_snapshot(pages(1, 5)) == PrefixMatch(tree.root, (), 2)  # its pages stay
    with pytest.raises(KVCacheError, match="2 snapshots are promised"):
        tree.check(idle=True)
    snapshots.give(first, long)
    snapshots.give(second, long)  # it has one: the other is free
    assert tree.evict(1) == [12]
    assert long.snapshot is None
    assert {keep(other), keep(tree.root)} == {first, second}
    with pytest.raises(KVCacheError, match=r"0 free \+ 0 promised \+ 2 of 1 nodes != 2"):
        tree.check()


def test_misuse_is_told() -> None:
    tree = RadixCache(2)
    with pytest.raises(KVCacheError, match="3 tokens do not fill 1 blocks of 2"):
        tree.insert([1, 2, 3], [0])
    node = tree.insert([1, 2], [0]).node
    with pytest.raises(KVCacheError, match="unlocked more often than locked"):
        tree.unlock(node)


class Model:
    """The same cache as a dictionary; and who holds which block, as an allocator would know."""

    def __init__(self, tree: RadixCache, num_blocks: int) -> None:
        self.tree = tree
        self.cached: dict[tuple[int, ...], int] = {}
        self.free = list(range(num_blocks))
        self.locks: list[tuple[RadixNode, tuple[int, ...]]] = []  # (locked node, its tokens)

    def match(self, tokens: list[int]) -> list[int]:
        size, blocks = self.tree.block_size, []
        for stop in range(size, len(tokens) + 1, size):
            if tuple(tokens[:stop]) not in self.cached:
                break
            blocks.append(self.cached[tuple(tokens[:stop])])
        return blocks

    def insert(self, tokens: list[int]) -> None:
        size = self.tree.block_size
        tokens = tokens[: len(tokens) // size * size]
        known = self.match(tokens)
        # As a request has it: some of what is known was shared with it, the rest it computed itself.
        shared = known[: random.randint(0, len(known))]
        fresh = len(tokens) // size - len(shared)
        if fresh > len(self.free):
            return
        blocks = shared + [self.free.pop() for _ in range(fresh)]
        inserted = self.tree.insert(tokens, blocks)
        assert inserted.duplicates == tuple(blocks[len(shared) : len(known)])
        self.free += inserted.duplicates
        assert inserted.blocks == (*known, *blocks[len(known) :])
        for index, block in enumerate(inserted.blocks, 1):
            self.cached[tuple(tokens[: index * size])] = block

    def lock(self, tokens: list[int]) -> None:
        match = self.tree.match(tokens)
        self.tree.lock(match.node)
        self.locks.append((match.node, tuple(tokens[: len(match.blocks) * self.tree.block_size])))

    def unlock(self) -> None:
        if self.locks:
            node, _ = self.locks.pop(random.randrange(len(self.locks)))
            self.tree.unlock(node)

    def locked(self) -> set[tuple[int, ...]]:
        size = self.tree.block_size
        return {path[:stop] for _, path in self.locks for stop in range(size, len(path) + 1, size)}

    def evict(self, count: int) -> None:
        evicted, locked = self.tree.evict(count), self.locked()
        assert len(evicted) == min(count, len(self.cached) - len(locked))
        gone = {key for key, block in self.cached.items() if block in set(evicted)}
        assert not gone & locked
        assert len(gone) == len(evicted)
        for key in gone:
            del self.cached[key]
        # Nothing is left whose beginning is gone.
        size = self.tree.block_size
        assert all(key[:-size] in self.cached for key in self.cached if len(key) > size)
        self.free += evicted


@pytest.mark.long
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_thousands_of_random_operations_agree_with_the_model(block_size: int) -> None:
    num_blocks = 40
    tree = RadixCache(block_size)
    model = Model(tree, num_blocks)

    def tokens() -> list[int]:
        """Few different pages, so that paths meet; sometimes a page that is only half the same."""
        made = [token for _ in range(random.randint(0, 8)) for token in [random.randrange(3)] * block_size]
        if made and random.random() < 0.3:
            made[random.randrange(len(made))] = 7
        return made + [9] * random.randrange(block_size)

    for number in range(10_000):
        action = random.random()
        if action < 0.4:
            model.insert(tokens())
        elif action < 0.6:
            asked = tokens()
            assert list(tree.match(asked).blocks) == model.match(asked)
        elif action < 0.75 and len(model.locks) < 4:
            model.lock(tokens())
        elif action < 0.9:
            model.unlock()
        else:
            model.evict(random.randint(0, 10))
        assert tree.num_cached + len(model.free) == num_blocks
        assert (tree.num_cached, tree.num_locked) == (len(model.cached), len(model.locked()))
        if number % 20 == 0:
            tree.check()
    while model.locks:
        model.unlock()
    assert tree.num_locked == 0
    model.evict(num_blocks)
    assert tree.num_cached == 0
    assert sorted(model.free) == list(range(num_blocks))
    tree.check()


def test_many_touches_do_not_make_the_tree_grow() -> None:
    tree = RadixCache(1)
    for number in range(50):
        tree.insert([number, number], [2 * number, 2 * number + 1])
    for number in range(5000):
        tree.match([number % 50, number % 50])
    assert len(tree._heap) < 500
    tree.check()
    assert len(tree.evict(1000)) == 100
