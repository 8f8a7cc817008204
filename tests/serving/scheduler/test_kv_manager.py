"""KV memory of requests: sharing, duplicates, eviction, and that a refusal takes nothing.

And the prefix cache's tree, against a dictionary from every cached beginning to its block.
"""

import random

import pytest
import torch

from attention import BlockAllocator, KVCacheError, KVCacheExhausted, RequestToTokenTable
from model_runner import SamplingParams
from serving.scheduler import KVManager, PrefixMatch, RadixCache, RadixNode, TrackedRequest

SIZE = 4
PROMPT = list(range(10))  # two whole pages and a half


def make(num_blocks: int = 8, rows: int = 4, *, prefix_caching: bool = True) -> KVManager:
    table = RequestToTokenTable(rows, 6, SIZE)
    return KVManager(BlockAllocator(num_blocks), table, prefix_caching=prefix_caching)


def request(name: str, tokens: list[int], **params: int) -> TrackedRequest:
    return TrackedRequest(name, tokens, SamplingParams(**params))  # type: ignore[arg-type]


def admit(kv: KVManager, one: TrackedRequest) -> None:
    kv.admit(one, kv.lookup(one), one.num_tokens)


def write(kv: KVManager, one: TrackedRequest, count: int) -> None:
    """A step was processed that computed so many of its tokens."""
    one.num_computed_tokens = one.num_written_tokens = count
    kv.cache_written(one)


def held(kv: KVManager, name: str, tokens: list[int], written: int = 0) -> TrackedRequest:
    """A request that was admitted, and has computed so many of its tokens."""
    one = request(name, tokens)
    admit(kv, one)
    if written:
        write(kv, one, written)
    return one


def blocks(kv: KVManager, one: TrackedRequest) -> tuple[int, ...]:
    return kv._table.blocks(one.row)


def test_a_prefix_is_shared_once_it_is_written() -> None:
    kv = make()
    first, second = request("a", PROMPT), request("b", PROMPT)
    admit(kv, first)
    assert kv.lookup(second).blocks == ()
    write(kv, first, 4)
    assert kv.lookup(second).blocks == blocks(kv, first)[:1]
    write(kv, first, 10)  # half a page stays the request's own
    admit(kv, second)
    assert second.num_computed_tokens == 8
    assert blocks(kv, second)[:2] == blocks(kv, first)[:2]
    assert blocks(kv, second)[2] != blocks(kv, first)[2]
    kv.check([first, second])
    kv.release(first)
    kv.check([second])
    assert kv.usage == 3 / 8
    kv.release(second)
    kv.check([], idle=True)
    assert (kv.usage, kv.tree.num_cached, kv.num_available) == (0, 2, 8)


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    kv = make()
    held(kv, "a", PROMPT[:8], 8)
    assert len(kv.lookup(request("b", PROMPT[:8])).blocks) == 1
    assert len(kv.lookup(request("c", PROMPT[:9])).blocks) == 2


def test_prompt_logprobs_and_a_cache_that_is_off_find_nothing() -> None:
    kv = make()
    held(kv, "a", PROMPT, 10)
    assert kv.lookup(request("b", PROMPT, prompt_logprobs=0)).blocks == ()
    off = make(prefix_caching=False)
    other = held(off, "a", PROMPT, 10)
    assert off.lookup(request("b", PROMPT)).blocks == ()
    off.release(other)
    assert off.tree.num_cached == 0
    off.check([], idle=True)


def test_two_that_computed_the_same_keep_one_copy() -> None:
    kv = make()
    first, second = held(kv, "a", PROMPT), held(kv, "b", PROMPT)
    own = blocks(kv, second)
    write(kv, first, 10)
    write(kv, second, 10)
    assert blocks(kv, second) == (*blocks(kv, first)[:2], own[2])
    assert kv._table.page_table([second.row or 0]).tolist() == [list(blocks(kv, second))]
    assert kv.num_available == 8 - 4
    kv.check([first, second])


def test_blocks_that_only_the_cache_holds_are_evicted_when_needed() -> None:
    kv = make(num_blocks=4)
    old = held(kv, "old", PROMPT, 10)
    kv.release(old)
    assert (kv.tree.num_cached, kv.num_available) == (2, 4)
    new = held(kv, "new", [90 + token for token in range(16)])
    assert kv.tree.num_cached == 0
    kv.check([new])


def test_what_a_request_reads_is_not_evicted() -> None:
    kv = make(num_blocks=4)
    reader = held(kv, "reader", PROMPT, 10)
    with pytest.raises(KVCacheExhausted, match="2 KV blocks needed, 1 of 4 free"):
        kv.reserve(reader, 17)
    assert kv.tree.num_cached == 2
    kv.reserve(reader, 16)
    assert reader.num_kv_blocks == 4


@pytest.mark.parametrize("lack", ["blocks", "rows", "length"])
def test_a_refused_admission_takes_nothing(lack: str) -> None:
    kv = make(num_blocks=4 if lack == "blocks" else 30, rows=1 if lack == "rows" else 4)
    first = held(kv, "first", PROMPT, 10)
    before = (kv.num_available, kv.tree.num_locked)
    length = {"blocks": 20, "rows": 10, "length": 25}[lack]
    second = request("second", PROMPT + [50] * (length - 10))
    with pytest.raises(KVCacheExhausted):
        admit(kv, second)
    assert (kv.num_available, kv.tree.num_locked, second.row) == (*before, None)
    kv.check([first])


def test_a_match_counts_what_locking_it_takes_from_the_evictable() -> None:
    kv = make()
    old = held(kv, "old", PROMPT, 10)
    match = kv.lookup(request("new", PROMPT))
    assert kv.num_available_beside(match) == kv.num_available == 5
    kv.release(old)
    assert (kv.num_available, kv.num_available_beside(match)) == (8, 6)


def test_one_more_block_for_each_or_for_none() -> None:
    kv = make(num_blocks=6)
    first, second = held(kv, "a", [1] * 8), held(kv, "b", [2] * 4)
    kv.reserve_block_each([first, second])
    assert (len(blocks(kv, first)), len(blocks(kv, second))) == (3, 2)
    with pytest.raises(KVCacheExhausted, match="2 KV blocks needed, 1 of 6 free"):
        kv.reserve_block_each([first, second])
    kv.check([first, second])


def test_the_check_finds_a_lost_and_a_shared_block() -> None:
    kv = make()
    one = held(kv, "a", PROMPT)
    with pytest.raises(KVCacheError, match="not conserved"):
        kv.check([])
    one.num_shared_tokens = 4
    with pytest.raises(KVCacheError, match="the prefix cache does not have"):
        kv.check([one])
    one.num_shared_tokens = 0
    with pytest.raises(KVCacheError, match="3 KV blocks are held and 0 locked"):
        kv.check([one], idle=True)


def test_the_table_replaces_blocks_and_appends_to_many_rows() -> None:
    table = RequestToTokenTable(3, 3, 2)
    rows = [table.add_row() for _ in range(3)]
    for row in rows:
        table.append(row, [row, row + 10])
    table.replace(rows[1], 0, [7])
    assert table.blocks(rows[1]) == (7, 11)
    assert table.slots(torch.tensor([1, 1, 1, 1]), torch.arange(4)).tolist() == [14, 15, 22, 23]
    table.replace(rows[1], 1, [])
    table.append_each([2, 0], [20, 21])
    assert table.page_table([0, 2]).tolist() == [[0, 10, 21], [2, 12, 20]]
    with pytest.raises(KVCacheExhausted, match="needs 4 KV blocks, its row holds 3"):
        table.append_each([1, 0], [22, 23])
    assert table.blocks(1) == (7, 11)
    with pytest.raises(KVCacheError, match="cannot replace blocks 1 to 3 of row 1: it has 2"):
        table.replace(1, 1, [3, 4])


# -- the prefix cache's tree -------------------------------------------------------------------------------------------


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
    for evicted in (False, True):
        assert tree.evict(evicted) == [0] * evicted
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
