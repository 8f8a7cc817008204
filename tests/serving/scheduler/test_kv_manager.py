"""KV memory of requests: sharing, duplicates, eviction, and that a refusal takes nothing."""

import pytest
import torch

from attention import BlockAllocator, KVCacheError, KVCacheExhausted, RequestToTokenTable
from model_runner import SamplingParams
from serving.scheduler import KVManager, TrackedRequest

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
