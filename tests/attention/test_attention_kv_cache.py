"""The paged KV cache: memory, allocation, block tables, and which requests read what others of the batch write."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import (
    BlockAllocator,
    KVCacheError,
    KVCacheExhausted,
    KVCacheSpec,
    MLACacheSpec,
    MLAKVCache,
    PagedKVCache,
    RequestToTokenTable,
    make_kv_cache,
    reads_of_later_writes,
)
from attention.kv_cache import quantize_fp8
from ubatch import ConfigError, UBatchError


def test_spec_counts_bytes_and_blocks() -> None:
    spec = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, dtype=torch.bfloat16)
    assert spec.bytes_per_block == 2 * 3 * 16 * 2 * 8 * 2
    assert [spec.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert spec.blocks_in(10 * spec.bytes_per_block + 1) == 10
    with pytest.raises(ConfigError, match="hold no block"):
        spec.blocks_in(spec.bytes_per_block - 1)
    with pytest.raises(ConfigError, match="block_size"):
        KVCacheSpec(1, 1, 8, block_size=0)


def test_write_goes_to_the_slots_and_padding_nowhere() -> None:
    cache = PagedKVCache(KVCacheSpec(2, 2, 4, block_size=4), num_blocks=3)
    k, v = torch.randn(2, 5, 2, 4)
    slots = cache.write_slots(torch.tensor([9, -1, 0, -1, 7]))
    cache.write(1, k, v, slots)
    expected_k, expected_v = torch.zeros(2, 12, 2, 4)
    for token, slot in ((0, 9), (2, 0), (4, 7)):
        expected_k[slot], expected_v[slot] = k[token], v[token]
    assert torch.equal(cache.keys(1).flatten(0, 1), expected_k)
    assert torch.equal(cache.values(1).flatten(0, 1), expected_v)
    assert not cache.keys(0).any()
    assert cache.keys(1).shape == (3, 4, 2, 4)
    assert cache.nbytes == 2 * 2 * (3 + 1) * 4 * 2 * 4 * 4


def test_a_raw_padding_slot_is_refused_by_write() -> None:
    cache = PagedKVCache(KVCacheSpec(1, 1, 4), num_blocks=1)
    with pytest.raises(IndexError):
        cache.write(0, torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), torch.tensor([-1]))


def test_allocator_exhaustion_takes_nothing() -> None:
    allocator = BlockAllocator(4)
    held = allocator.allocate(3)
    with pytest.raises(KVCacheExhausted, match="2 KV blocks needed, 1 of 4 free") as caught:
        allocator.allocate(2)
    assert isinstance(caught.value, UBatchError)
    assert (allocator.num_free, allocator.num_used) == (1, 3)
    allocator.free(held)
    allocator.check(idle=True)
    assert allocator.allocate(0) == []


@pytest.mark.parametrize("blocks", [[5], [0, 0], [-1]])
def test_wrong_free_is_refused_and_frees_nothing(blocks: list[int]) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    with pytest.raises(KVCacheError):
        allocator.free(blocks)
    assert allocator.num_used == 2
    allocator.check()


def test_check_notices_a_leak() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(1)
    with pytest.raises(KVCacheError, match="still in use"):
        allocator.check(idle=True)
    allocator._free.pop()
    with pytest.raises(KVCacheError, match="not conserved"):
        allocator.check()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_allocator_against_a_set(steps: list[tuple[bool, int]]) -> None:
    allocator = BlockAllocator(16)
    held: list[list[int]] = []
    for allocate, number in steps:
        in_use = {block for blocks in held for block in blocks}
        if allocate and number <= 16 - len(in_use):
            taken = allocator.allocate(number)
            assert len(taken) == number
            assert not in_use & set(taken)
            held.append(taken)
        elif allocate:
            with pytest.raises(KVCacheExhausted):
                allocator.allocate(number)
        elif held:
            allocator.free(held.pop(number % len(held)))
        allocator.check()
        assert allocator.num_used == sum(map(len, held))


@pytest.mark.parametrize("block_size", [1, 16, 64, 128])
def test_request_table_rows(block_size: int) -> None:
    table = RequestToTokenTable(max_num_reqs=2, max_blocks=4, block_size=block_size)
    first, second = table.add_row(), table.add_row()
    with pytest.raises(KVCacheExhausted, match="all 2 rows"):
        table.add_row()
    table.append(first, [7, 3])
    table.append(second, [5])
    table.append(first, [1])
    assert table.blocks(first) == (7, 3, 1)
    pages = table.page_table([second, first])
    assert pages.tolist() == [[5, 0, 0], [7, 3, 1]]
    assert pages.dtype == torch.int32
    rows = torch.tensor([first, second, first])
    positions = torch.tensor([2 * block_size, block_size - 1, block_size + block_size // 2])
    expected = [block_size, 5 * block_size + block_size - 1, 3 * block_size + block_size // 2]
    assert table.slots(rows, positions).tolist() == expected
    with pytest.raises(KVCacheExhausted, match="at most 4"):
        table.append(first, [0, 2])
    assert table.remove_row(first) == [7, 3, 1]
    assert pages.tolist() == [[5, 0, 0], [7, 3, 1]]  # a running step keeps its own copy
    assert table.num_free_rows == 1
    assert table.page_table([table.add_row()]).shape == (1, 0)
    with pytest.raises(KVCacheError, match="not in use"):
        table.remove_row(99)
    assert table.page_table([]).shape == (0, 0)


def test_latents_are_one_row_for_all_heads() -> None:
    spec = MLACacheSpec(2, 6, 2, block_size=4)
    cache = make_kv_cache(spec, 3)
    assert isinstance(cache, MLAKVCache)
    latent, k_rope = torch.randn(3, 6), torch.randn(3, 2)
    cache.write(1, latent, k_rope, cache.write_slots(torch.tensor([9, -1, 0])))
    expected = torch.zeros(12, 8)
    expected[9], expected[0] = torch.cat((latent[0], k_rope[0])), torch.cat((latent[2], k_rope[2]))
    assert torch.equal(cache.rows(1).flatten(0, 1), expected)
    assert not cache.rows(0).any()
    assert spec.bytes_per_block == 2 * 4 * 8 * 4
    assert cache.nbytes == (3 + 1) * spec.bytes_per_block
    # DeepSeek-V2's sizes: 576 numbers a token, where 128 heads of 192 and 128 would be 71 times as many
    assert MLACacheSpec(1, 512, 64).numbers_per_token == 576


def test_fp8_is_stored_as_scaled_bytes() -> None:
    spec = KVCacheSpec(2, 2, 4, block_size=4, fp8=True)
    cache = PagedKVCache(spec, num_blocks=2)
    assert spec.bytes_per_block * 4 == KVCacheSpec(2, 2, 4, block_size=4).bytes_per_block
    cache.set_scales(1, 0.5, 4.0)
    k, v = torch.randn(2, 3, 2, 4)
    v[0, 0, 0] = 1e6  # saturates, does not become nan
    cache.write(1, k, v, cache.write_slots(torch.tensor([5, 2, -1])))
    assert cache.keys(1).dtype == torch.uint8
    keys = cache.key_pool.decode(cache.keys(1), 1).flatten(0, 1)
    values = cache.value_pool.decode(cache.values(1), 1).flatten(0, 1)
    torch.testing.assert_close(keys[[5, 2]], k[:2], rtol=0.07, atol=0.01)
    assert values[5, 0, 0] == 448 * 4
    torch.testing.assert_close(values[2], v[1], rtol=0.07, atol=0.02)
    assert not keys[[0, 1, 3, 4, 6, 7]].any()
    with pytest.raises(ConfigError, match="must be positive, not 0"):
        cache.set_scales(0, 1.0, 0.0)
    with pytest.raises(ConfigError, match="only an fp8 cache has"):
        PagedKVCache(KVCacheSpec(1, 1, 4), 1).set_scales(0, 1.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fp8_is_the_number_nearest_to_the_exact_quotient(dtype: torch.dtype) -> None:
    x = (torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    for scale in (1.0, 0.37, 1.7):
        exact = x.double() / scale
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        nearest = (numbers.nan_to_num(torch.inf) - exact[:, None]).abs().amin(dim=1)
        found = (quantize_fp8(x, scale).view(torch.float8_e4m3fn).double() - exact).abs()
        torch.testing.assert_close(found, nearest, atol=1e-6, rtol=1e-6)


def test_nonsense_sizes() -> None:
    spec = KVCacheSpec(1, 1, 8)
    with pytest.raises(ConfigError):
        PagedKVCache(spec, 0)
    with pytest.raises(ConfigError):
        BlockAllocator(0)
    with pytest.raises(ConfigError):
        RequestToTokenTable(0, 4, 4)
    with pytest.raises(ConfigError, match="kv_lora_rank"):
        MLACacheSpec(1, 0, 4)


def reference(query_lens: list[int], seq_lens: list[int], tables: list[list[int]], block: int) -> set[tuple[int, int]]:
    """Block by block, as the docstring says: the last writer of a block that another request reads."""
    pairs = set()
    for reader, (query, seq) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if not query:
            continue
        for page in tables[reader][: -(-(seq - query) // block)]:
            writers = [
                writer
                for writer, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True))
                if q and page in tables[writer][(s - q) // block : -(-s // block)]
            ]
            if writers and max(writers) > reader:
                pairs.add((reader, max(writers)))
    return pairs


def test_a_prefix_hit_within_the_batch() -> None:
    # Request 1 computes blocks 5 and 6; requests 0 and 2 have them as their prefix.
    table = torch.tensor([[5, 6, 0], [5, 6, 0], [5, 6, 3]], dtype=torch.int32)
    assert reads_of_later_writes([4, 32, 4], [32, 32, 36], table, 16) == ((0, 1),)
    assert reads_of_later_writes([4, 0, 4], [32, 32, 36], table, 16) == ()  # computed before: nobody writes it
    assert reads_of_later_writes([], [], torch.zeros(0, 0, dtype=torch.int32), 16) == ()


@pytest.mark.parametrize("seed", range(30))
def test_against_the_plain_definition(seed: int) -> None:
    rng = random.Random(seed)
    block = rng.choice([1, 4, 16])
    requests = rng.randint(1, 6)
    query_lens = [rng.choice([0, 1, 3, 20]) for _ in range(requests)]
    seq_lens = [query + rng.choice([0, 2, 16, 40]) for query in query_lens]
    tables = [[rng.randrange(12) for _ in range(-(-seq // block))] for seq in seq_lens]
    width = max(map(len, tables)) + 1
    padded = torch.tensor([row + [-1] * (width - len(row)) for row in tables], dtype=torch.int32)
    found = reads_of_later_writes(query_lens, seq_lens, padded, block)
    assert set(found) == reference(query_lens, seq_lens, tables, block)
    assert list(found) == sorted(set(found))
