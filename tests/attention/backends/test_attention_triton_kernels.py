"""Each Triton kernel of attention against the slow way to say the same."""

from __future__ import annotations

import pytest
import torch
from attention_batches import Batch, make_batch
from triton_batches import DEVICE, numbers

from attention import AttentionShape, KVCacheSpec, PagedKVCache
from attention.kernels.attend import num_tiles, plan_mask_offsets, plan_tiles, prefill_attention
from attention.kernels.batch import pad_ragged, unpad_ragged
from attention.kernels.cache import write_kv
from attention.kernels.decode import DecodeSplits, decode_attention
from attention.kernels.tile import PagedBatch, PagedLayer, TileSize
from ubatch import ForwardMode


def paged(batch: Batch, cache: PagedKVCache) -> PagedLayer:
    of = batch.metadata
    requests = PagedBatch(of.num_reqs, of.query_start_loc, of.seq_lens, of.block_table)
    return PagedLayer(batch.shape, cache, 0, requests, batch.sinks)


def written(requests: list[tuple[int, int]], *, sinks: bool) -> tuple[Batch, Batch, PagedKVCache]:
    """A batch, the same on the device, and a cache there that has the new tokens, too."""
    shape = AttentionShape(4, 2, 8, sinks=sinks)
    batch = make_batch(requests, shape=shape, mode=ForwardMode.MIXED)
    there = batch.on(DEVICE)
    cache = there.new_cache()
    write_kv(cache, 0, there.k, there.v, there.metadata.slot_mapping)
    return batch, there, cache


@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
@pytest.mark.parametrize("heads", [(4, 2, 8), (3, 3, 24)], ids=["pow2", "odd"])
def test_keys_and_values_are_written_and_padding_is_not(fp8: bool, heads: tuple[int, int, int]) -> None:
    batch = make_batch([(3, 2), (0, 4)], heads=heads, num_layers=2, padding=2, fp8=fp8)
    cache, expected = batch.on(DEVICE).new_cache(), batch.new_cache()
    real = batch.metadata.slot_mapping >= 0
    slots = batch.metadata.slot_mapping.to(DEVICE)
    write_kv(cache, 1, 3 * batch.k.to(DEVICE), 3 * batch.v.to(DEVICE), slots)
    expected.write(1, 3 * batch.k[real], 3 * batch.v[real], batch.metadata.slot_mapping[real])
    for pool, expected_pool in ((cache.key_pool, expected.key_pool), (cache.value_pool, expected.value_pool)):
        # The hidden block and the other layer, too. As numbers, because fp8 has a zero with a sign.
        assert torch.equal(numbers(pool.memory), numbers(expected_pool.memory))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_numbers_are_rounded_and_saturated_as_in_torch(dtype: torch.dtype) -> None:
    edges = torch.tensor([0.0, 1e-4, 447.0, -1e4, 1e4, 2.0**-9, 2.0**-10, 1.9375])
    k = torch.cat((torch.randn(256) * 10, torch.randn(128) / 100, edges)).to(dtype).view(-1, 1, 8)
    slots = torch.arange(len(k))
    spec = KVCacheSpec(1, 1, 8, block_size=1, fp8=True)
    cache, expected = (PagedKVCache(spec, len(k), device) for device in (DEVICE, "cpu"))
    for each in (cache, expected):
        each.set_scales(0, 1.0, 0.25)  # powers of two: dividing by them rounds nothing in any dtype
    write_kv(cache, 0, k.to(DEVICE), k.to(DEVICE), slots.to(DEVICE))
    expected.write(0, k, k, slots)
    assert torch.equal(numbers(cache.key_pool.memory), numbers(expected.key_pool.memory))
    assert torch.equal(numbers(cache.value_pool.memory), numbers(expected.value_pool.memory))


@pytest.mark.parametrize("row", [(2, 8), (3, 5), (1200,)], ids=["pow2", "odd", "several blocks"])
def test_ragged_requests_are_padded_and_unpadded(row: tuple[int, ...]) -> None:
    lens = [3, 0, 1, 4]
    starts = torch.tensor([0, 3, 3, 4, 8], dtype=torch.int32, device=DEVICE)
    x = torch.randn(10, row[0] + 1, *row[1:], device=DEVICE)[:, 1:]  # strided; two rows are nobody's
    expected = torch.zeros(4, 5, *row, device=DEVICE)
    for request, (start, length) in enumerate(zip(starts.tolist(), lens, strict=False)):
        expected[request, :length] = x[start : start + length]
    padded = pad_ragged(x, starts, 5)
    assert torch.equal(padded, expected)
    ragged = unpad_ragged(padded, starts, 10)
    assert torch.equal(ragged[:8], x[:8])
    assert not ragged[8:].any()


@pytest.mark.parametrize("lens", [[1], [4, 8, 3], [0, 13, 1, 0, 5], [200, 1, 7]])
@pytest.mark.parametrize(("queries_per_tile", "min_queries"), [(4, 1), (5, 2), (16, 1)])
def test_tiles_cover_every_query_once(lens: list[int], queries_per_tile: int, min_queries: int) -> None:
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32, device=DEVICE)
    tiles = torch.full((num_tiles(len(lens), sum(lens), queries_per_tile), 2), 99, dtype=torch.int32, device=DEVICE)
    plan_tiles(tiles, starts, len(lens), queries_per_tile, min_queries)
    found = sorted((request, first) for request, first in tiles.tolist() if request >= 0)
    wanted = [(r, first) for r, n in enumerate(lens) if n >= min_queries for first in range(0, n, queries_per_tile)]
    assert found == wanted


def test_tree_masks_are_found_behind_those_of_earlier_requests() -> None:
    batch = make_batch([(7, 3), (2, 3), (11, 3), (0, 0)], drafts="tree")
    verify = batch.metadata.spec_verify
    assert verify is not None
    offsets = torch.full((4,), -1, dtype=torch.int64, device=DEVICE)
    plan_mask_offsets(offsets, batch.metadata.seq_lens.to(DEVICE), 4, verify.num_draft_tokens)
    assert tuple(offsets.tolist()) == verify.mask_offsets


@pytest.mark.sample(2)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_split_decode_gives_each_request_its_output(num_splits: int, sinks: bool) -> None:
    """Also with more splits than keys; a request with more queries is left alone."""
    batch, there, cache = written([(50, 1), (3, 1), (8, 3), (20, 2)], sinks=sinks)
    out = torch.full((7, 4, 8), 7.0, device=DEVICE)
    splits = DecodeSplits(2, num_splits)
    workspace = torch.full((splits.workspace_numbers(batch.shape, 4),), torch.nan, device=DEVICE)
    decode_attention(there.q, out, paged(there, cache), splits, workspace)
    expected = batch.expected()
    expected[2:5] = 7
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_paged_prefill_gives_each_request_its_output(sinks: bool) -> None:
    """Behind prefixes, over several tiles of queries and keys; requests without a tile are left alone."""
    batch, there, cache = written([(37, 9), (5, 1), (0, 18)], sinks=sinks)
    size, out = TileSize.prefill(batch.shape, torch.float32), torch.full((28, 4, 8), 7.0, device=DEVICE)
    queries = size.queries(batch.shape)
    tiles = torch.zeros(num_tiles(3, 28, queries), 2, dtype=torch.int32, device=DEVICE)
    plan_tiles(tiles, there.metadata.query_start_loc, 3, queries, min_queries=2)
    prefill_attention(there.q, out, paged(there, cache), tiles, size)
    expected = batch.expected()
    expected[9] = 7
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
