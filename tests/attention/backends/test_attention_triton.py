"""What is special about the `triton` back ends: which kernels a batch launches, how keys are split, and graphs.

Each kernel is compared with the slow way to say the same. `test_attention_conformance` says that what comes out is
right, and `test_attention_conformance_gpu` the same of what is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_batches import fp8_scales, make_batch, make_mla_batch
from attention_conformance import GRAPHS, LIMITS, Bench, check, check_replays, refused
from triton_batches import DEVICE, numbers

from attention import AttentionShape, KVCacheSpec, MLAShape, PagedKVCache
from attention.backends import store
from attention.backends.triton.mha import TritonAttentionBackend
from attention.backends.triton.mla import TritonMLABackend
from attention.kernels import decode as decode_kernels
from attention.kernels import tuning
from attention.kernels.attend import num_tiles, plan_mask_offsets, plan_tiles, prefill_attention
from attention.kernels.batch import pad_ragged, unpad_ragged
from attention.kernels.cache import write_kv
from attention.kernels.decode import DecodeSplits, decode_attention
from attention.kernels.latent import LatentTile, write_latent
from attention.kernels.tile import PagedBatch, PagedLayer, TileSize
from ubatch import ConfigError, ForwardMode
from ubatch.kernels.triton_jit import INTERPRETED

pytestmark = pytest.mark.triton

MHA, MLA = Bench("triton", False, TritonAttentionBackend), Bench("triton", True, TritonMLABackend)
BOTH = pytest.mark.parametrize("bench", [MHA, MLA], ids=["mha", "mla"])
DECODE = [(5, 1), (33, 1), (1, 1), (18, 1)]
MIXED = [(9, 4), (0, 7), (21, 1), (0, 0), (2, 1), (0, 1)]
EXTEND = [(50, 6), (3, 2), (17, 1)]
EXTENDS: dict[str, Any] = {"mode": ForwardMode.DRAFT_EXTEND}


@pytest.fixture(autouse=True, scope="module")
def _short_splits() -> Iterator[None]:
    """Requests are short, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernels, "MIN_KEYS_PER_SPLIT", 16)
        yield


# -- what is launched --------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("requests", "decodes", "absorbed"),
    [
        (DECODE, True, [0, 1, 2, 3]),
        ([(0, 5), (0, 17)], False, []),
        ([(19, 9), (3, 2)], False, []),
        (MIXED, True, [2, 4]),
        ([], False, []),
    ],
    ids=["decode", "prompts", "behind a prefix", "mixed", "nothing"],
)
def test_only_what_the_batch_has_is_launched(requests: Any, decodes: bool, absorbed: list[int]) -> None:
    plan = check(MHA, MHA.batch(requests, padding=2))
    many = {request for request, (_, new) in enumerate(requests) if new > 1}
    assert (plan.splits is not None, plan.tiles is not None) == (decodes, bool(many))
    in_tiles = set() if plan.tiles is None else {request for request, _ in plan.tiles.tolist() if request >= 0}
    assert in_tiles == many
    plan = check(MLA, MLA.batch(requests, padding=2))
    assert (plan.absorbed is not None, bool(plan.expanded)) == (bool(absorbed), bool(requests) and requests != DECODE)
    if absorbed:
        assert plan.absorbed.batch.seq_lens.tolist() == [sum(requests[index]) for index in absorbed]


@pytest.mark.wide
@pytest.mark.sample(4)
@pytest.mark.parametrize("window", [None, 2, 6])
@pytest.mark.parametrize("drafts", ["chain", "tree"])
@pytest.mark.parametrize("heads", [4, 16], ids=["decoded", "in tiles"])
def test_many_drafts_of_many_heads_are_in_tiles(heads: int, drafts: Any, window: int | None) -> None:
    """A window in a tree goes by depth: a draft's parent may lie many places before it, and is still next to it."""
    shape = AttentionShape(heads, 2, 8, sliding_window=window)
    plan = check(MHA, make_batch([(9, 20), (2, 20), (0, 0)], shape=shape, drafts=drafts, padding=1))
    assert (plan.tiles is None) == (heads == 4)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("waves", "num_splits"), [(0, 1), (1, 2), (3, 4)])
def test_splits_of_latents_give_the_same(waves: int, num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, some, and more than a request has keys; more rows than a tile has."""
    choice = tuning.LatentChoice(16, 16, 4, 1, waves)
    monkeypatch.setattr(tuning, "latent_choices", lambda *args, **options: [choice])
    assert check(MLA, make_mla_batch(EXTEND, **EXTENDS)).absorbed.splits.num_splits == num_splits


def test_a_tile_of_many_rows_reads_latents_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And uses them as keys and as values."""
    monkeypatch.setattr(tuning, "latent_choices", lambda *args, **options: [tuning.LatentChoice(64, 16, 4, 1, 2)])
    check(MLA, make_mla_batch(EXTEND, **EXTENDS))
    check(MLA, make_mla_batch([(20, 4), (9, 4)], drafts="tree"))


@pytest.mark.parametrize(
    ("num_reqs", "max_seq_len", "window", "expected"),
    [
        (1, 4096, None, 32),
        (1, 64, None, 4),
        (8, 4096, None, 4),
        (7, 4096, None, 5),
        (31, 4096, None, 1),
        (64, 4096, None, 1),
        (1, 4096, 50, 4),
        (0, 0, None, 1),
    ],
    ids=["long", "short", "several", "one more", "nearly enough", "many", "window", "nothing"],
)
def test_keys_are_split_as_long_as_there_are_programs_to_run_them(
    num_reqs: int, max_seq_len: int, window: int | None, expected: int
) -> None:
    shape = AttentionShape(8, 2, 8, sliding_window=window)
    assert DecodeSplits.choose(shape, num_reqs, 1, max_seq_len, 64).num_splits == expected


def test_tiles_hold_whole_rows_of_queries_and_heads() -> None:
    for heads, queries in ((1, 1), (16, 1), (128, 1), (3, 7)):
        shape = MLAShape(heads, 512, 128, 64, 128)
        for dtype in (torch.float32, torch.bfloat16):
            tile = LatentTile.default(shape, queries, dtype, fp8=False)
            blocks = tile.blocks(shape, queries)
            assert blocks * tile.rows >= heads * queries > (blocks - 1) * tile.rows


def test_a_cpu_is_served_by_the_interpreter_only() -> None:
    assert ("cpu" in TritonAttentionBackend.traits.devices) == INTERPRETED


@BOTH
def test_what_a_plan_is_given_must_fit_it(bench: Bench) -> None:
    batch = bench.batch(DECODE).on(DEVICE)
    plan = bench.make(batch).plan(batch.metadata)
    with pytest.raises(ConfigError, match="planned for 4 tokens and got 3"):
        batch.part(slice(1, None)).forward(plan)


# -- memory and graphs -------------------------------------------------------------------------------------------------


def test_the_workspace_is_made_with_the_first_plan_and_kept_for_smaller_ones() -> None:
    batch = MHA.batch(DECODE).on(DEVICE)
    backend = MHA.make(batch)
    plan = backend.plan(batch.metadata)
    made = backend.nbytes
    assert made == 4 * plan.splits.workspace_numbers(batch.shape, len(DECODE)) > 0
    assert not plan.workspace.any()
    smaller = backend.plan(MHA.batch(DECODE[:2]).on(DEVICE).metadata)
    assert (smaller.workspace.data_ptr(), backend.nbytes) == (plan.workspace.data_ptr(), made)


@pytest.mark.sample(1)
@pytest.mark.parametrize("padding_only", [False, True])
def test_a_captured_plan_serves_prompts(padding_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels do, although runners capture none."""
    steps = [[(0, 5), (3, 6)], [] if padding_only else [(0, 1), (64, 10)], [(7, 9), (0, 0)]]
    monkeypatch.setitem(GRAPHS, "prompts", (3, {"mode": ForwardMode.PREFILL}, steps))
    check_replays(MHA, "prompts")


def test_graph_scalars_are_chosen_for_the_longest_request_the_limits_allow() -> None:
    batch = MHA.batch([(4, 1)]).on(DEVICE)
    backend = MHA.make(batch)
    backend.init_graph_buffers(LIMITS)
    eager, captured = backend.plan(batch.metadata), backend.plan_for_graph(batch.metadata)
    assert (eager.splits.num_splits, captured.splits.num_splits) == (1, LIMITS.max_seq_len // 16)


def test_captured_plans_keep_their_workspace_when_it_grows() -> None:
    small, large = MHA.batch([(4, 1)]).on(DEVICE), MHA.batch([(4, 1)] * 5).on(DEVICE)
    backend = MHA.make(large)
    backend.init_graph_buffers(LIMITS)
    first = backend.plan_for_graph(small.metadata)
    before, where = backend.nbytes, first.workspace.data_ptr()
    second = backend.plan_for_graph(large.metadata)
    assert first.workspace.data_ptr() == where != second.workspace.data_ptr()
    assert backend.nbytes == before + second.workspace.nbytes
    del first
    assert backend.nbytes < before + second.workspace.nbytes


@BOTH
def test_what_was_captured_with_a_tree_runs_no_chain(bench: Bench) -> None:
    tree, chain = (bench.batch([(4, 2)], drafts=drafts).on(DEVICE) for drafts in ("tree", "chain"))
    backend = bench.make(tree)
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(tree.metadata)
    with refused("captured with a tree mask"):
        backend.replan(plan, chain.metadata)
    if bench.mla:
        with pytest.raises(ConfigError, match="captures decode, verify and draft-extend batches, not prefill"):
            backend.plan_for_graph(bench.batch([(0, 4)]).on(DEVICE).metadata)


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
@pytest.mark.parametrize("shape", [None, MLAShape(2, 20, 3, 6, 5)], ids=["pow2", "odd"])
def test_latents_are_rotated_and_written_and_padding_is_not(shape: Any, fp8: bool, interleaved: bool) -> None:
    batch = make_mla_batch([(3, 2), (40, 4)], shape=shape, num_layers=2, padding=2, fp8=fp8, interleaved=interleaved)
    there, inputs, slots = batch.on(DEVICE), batch.inputs, batch.metadata.slot_mapping
    cache, expected = there.new_cache(), batch.new_cache()
    write_latent(cache, 1, 3 * there.inputs.latent, 3 * there.inputs.k_rope, there.inputs.rope, slots.to(DEVICE))
    real = slots >= 0
    expected.write(1, 3 * inputs.latent[real], inputs.rope.rotate(3 * inputs.k_rope)[real], slots[real])
    # The hidden block and the other layer, too. fp8 numbers may differ by a step where rotation rounds otherwise.
    stored, wanted = numbers(cache.pool.memory), numbers(expected.pool.memory)
    torch.testing.assert_close(stored, wanted, atol=1e-6, rtol=2.0**-3 if fp8 else 1e-6)
    assert not fp8 or (stored != wanted).float().mean() < 0.01
    assert not fp8 or cache.scale(1) == fp8_scales(1)[0]


@pytest.mark.parametrize("fused", [False, True])
def test_new_tokens_are_stored_in_one_kernel_where_there_is_one(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the back ends on flashinfer's kernels; the same cache either way."""
    monkeypatch.setattr(store, "_fuses", lambda cache: fused)
    for batch in (make_mla_batch([(3, 2), (9, 1)], padding=1), make_batch([(3, 2), (9, 1)], padding=1)):
        there: Any = batch.on(DEVICE)
        cache, expected = there.new_cache(), batch.new_cache()
        slots = cache.write_slots(there.metadata.slot_mapping)
        if hasattr(there, "inputs"):
            store.store_latents(cache, 0, there.inputs, slots)
        else:
            store.store_kv(cache, 0, there.k, there.v, slots)
        batch.expected(0, expected)
        for written, wanted in zip(cache._pools, expected._pools, strict=True):
            torch.testing.assert_close(written.blocks(0).cpu(), wanted.blocks(0))


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
    verify: Any = batch.metadata.spec_verify
    offsets = torch.full((4,), -1, dtype=torch.int64, device=DEVICE)
    plan_mask_offsets(offsets, batch.metadata.seq_lens.to(DEVICE), 4, verify.num_draft_tokens)
    assert tuple(offsets.tolist()) == verify.mask_offsets


@pytest.mark.sample(2)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_each_kernel_gives_its_requests_their_output_and_leaves_the_others_alone(num_splits: int, sinks: bool) -> None:
    """Decode with more splits than keys, too; prefill behind prefixes, over several tiles of queries and keys."""
    requests = [(50, 1), (3, 1), (37, 9), (5, 1), (20, 2), (0, 18)]
    batch = make_batch(requests, shape=AttentionShape(4, 2, 8, sinks=sinks), mode=ForwardMode.MIXED)
    there, expected = batch.on(DEVICE), batch.expected()
    cache, of = there.new_cache(), there.metadata
    write_kv(cache, 0, there.k, there.v, of.slot_mapping)
    paged = PagedBatch(of.num_reqs, of.query_start_loc, of.seq_lens, of.block_table)
    layer = PagedLayer(there.shape, cache, 0, paged, there.sinks)
    decoded, prefilled = torch.full((2, *there.q.shape), 7.0, device=DEVICE)
    splits = DecodeSplits(2, num_splits)
    workspace = torch.full((splits.workspace_numbers(there.shape, len(requests)),), torch.nan, device=DEVICE)
    decode_attention(there.q, decoded, layer, splits, workspace)
    size = TileSize.prefill(there.shape, torch.float32)
    queries = size.queries(there.shape)
    tiles = torch.zeros(num_tiles(len(requests), len(there.q), queries), 2, dtype=torch.int32, device=DEVICE)
    plan_tiles(tiles, of.query_start_loc, len(requests), queries, min_queries=2)
    prefill_attention(there.q, prefilled, layer, tiles, size)
    of_request = torch.tensor([new for _, new in requests for _ in range(new)])[:, None, None]
    for out, served in ((decoded, of_request <= 2), (prefilled, of_request >= 2)):
        torch.testing.assert_close(out.cpu(), torch.where(served, expected, 7.0), atol=1e-5, rtol=1e-5)
