"""Multi-head latent attention by Triton kernels: writing latents, and the `triton_mla` back end, plain and captured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from allocations import CountAllocations
from attention_batches import MLABatch, fp8_scales, make_batch, make_mla_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_batches import DEVICE, moved, moved_cache, numbers

from attention import GraphLimits, MLAInputs, MLAKVCache, MLAShape, UBatchAttention, make_attention_backend
from attention.backends import store
from attention.backends.triton.mla import TritonMLABackend, TritonMLAGraphPlan, TritonMLAPlan
from attention.kernels import decode as decode_kernels
from attention.kernels import tuning
from attention.kernels.latent import LatentTile, write_latent
from attention.metadata import split_attn_metadata
from ubatch import ConfigError, ForwardMode, UBatchSlice

pytestmark = pytest.mark.triton

CLOSE = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
DEEPSEEK = MLAShape(16, 512, 128, 64, 128)
DECODE = [(5, 1), (33, 1), (1, 1), (18, 1)]
MIXED = [(9, 4), (0, 7), (21, 1), (0, 0), (2, 1), (0, 1)]


@pytest.fixture(autouse=True, scope="module")
def _short_splits() -> Iterator[None]:
    """Requests are short, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernels, "MIN_KEYS_PER_SPLIT", 16)
        yield


def inputs_of(batch: MLABatch, dtype: torch.dtype = torch.float32) -> MLAInputs:
    """On the device, in `dtype`."""
    names = ("q_nope", "q_rope", "latent", "k_rope", "w_uk", "w_uv")
    parts = {name: getattr(batch.inputs, name).to(device=DEVICE, dtype=dtype) for name in names}
    return replace(batch.inputs, **parts, rope=moved(batch.inputs.rope))


def cache_of(batch: MLABatch, dtype: torch.dtype = torch.float32) -> MLAKVCache:
    here, there = batch.new_cache(), MLAKVCache(replace(batch.spec, dtype=dtype), batch.num_blocks, DEVICE)
    there.pool.memory.copy_(here.pool.memory)
    there.pool.scales[:] = here.pool.scales
    return there


def backend_of(batch: MLABatch, cache: MLAKVCache) -> TritonMLABackend:
    backend = make_attention_backend("triton", batch.shape, cache)
    assert isinstance(backend, TritonMLABackend)
    return backend


def check(batch: MLABatch, dtype: torch.dtype = torch.float32) -> TritonMLAPlan:
    """Output and cache are the reference's."""
    if dtype != torch.float32:
        batch = batch.to(dtype).to(torch.float32)  # numbers that `dtype` has
    cache, expected_cache = cache_of(batch, dtype), batch.new_cache()
    plan = backend_of(batch, cache).plan(moved(batch.metadata))
    for layer in range(batch.spec.num_layers):
        out = plan.forward(inputs_of(batch, dtype), layer)
        expected = batch.expected(layer, expected_cache)
        assert out.dtype == dtype
        assert out.is_contiguous()
        torch.testing.assert_close(out.cpu().float(), expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])
        if dtype == torch.float32:
            torch.testing.assert_close(numbers(cache.rows(layer)), numbers(expected_cache.rows(layer)))
    return plan


@pytest.mark.sample(3)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
@pytest.mark.parametrize("shape", [None, MLAShape(2, 20, 3, 6, 5)], ids=["pow2", "odd"])
def test_latents_are_rotated_and_written_and_padding_is_not(
    shape: MLAShape | None, fp8: bool, interleaved: bool
) -> None:
    batch = make_mla_batch([(3, 2), (40, 4)], shape=shape, num_layers=2, padding=2, fp8=fp8, interleaved=interleaved)
    cache, expected, inputs = cache_of(batch), batch.new_cache(), batch.inputs
    there, slots = inputs_of(batch), batch.metadata.slot_mapping
    write_latent(cache, 1, 3 * there.latent, 3 * there.k_rope, there.rope, slots.to(DEVICE))
    real = slots >= 0
    expected.write(1, 3 * inputs.latent[real], inputs.rope.rotate(3 * inputs.k_rope)[real], slots[real])
    # The hidden block and the other layer, too. fp8 numbers may differ by a step where rotation rounds otherwise.
    step = 2.0**-3 if fp8 else 1e-6
    torch.testing.assert_close(numbers(cache.pool.memory), numbers(expected.pool.memory), atol=1e-6, rtol=step)
    if fp8:
        assert (numbers(cache.pool.memory) != numbers(expected.pool.memory)).float().mean() < 0.01
        assert cache.scale(1) == fp8_scales(1)[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("requests", "absorbed", "expanded"),
    [
        (DECODE, [0, 1, 2, 3], False),
        ([(0, 5), (0, 9)], [], True),
        ([(19, 9), (3, 2)], [], True),
        (MIXED, [2, 4], True),
        ([], [], False),
    ],
    ids=["decode", "prompts", "behind a prefix", "mixed", "nothing"],
)
def test_equals_the_reference_and_absorbs_those_that_decode(
    requests: list[tuple[int, int]], absorbed: list[int], expanded: bool
) -> None:
    plan = check(make_mla_batch(requests, num_layers=2, padding=2))
    assert (plan.absorbed is not None) == bool(absorbed)
    assert bool(plan.expanded) == expanded
    if plan.absorbed is not None:
        wanted = torch.tensor([sum(requests[index]) for index in absorbed])
        assert torch.equal(plan.absorbed.batch.seq_lens.cpu().long(), wanted)


@pytest.mark.sample(4)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "shape", [MLAShape(3, 20, 3, 6, 5, scale=0.8), MLAShape(40, 16, 4, 4, 4)], ids=["odd", "many heads"]
)
def test_heads_of_every_kind(shape: MLAShape, interleaved: bool) -> None:
    check(make_mla_batch([(40, 1), (3, 1)], shape=shape, interleaved=interleaved))


@pytest.mark.sample(3)
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_page_sizes(block_size: int, fp8: bool) -> None:
    """With fp8 a rotated number may round to its neighbour."""
    batch = make_mla_batch([(70, 1), (15, 1), (63, 1)], block_size=block_size, fp8=fp8, padding=1)
    if not fp8:
        check(batch)
        return
    out = backend_of(batch, cache_of(batch)).plan(moved(batch.metadata)).forward(inputs_of(batch), 0)
    torch.testing.assert_close(out.cpu(), batch.expected(), atol=5e-3, rtol=5e-3)


@settings(max_examples=6)
@given(
    prefixes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    number=st.integers(1, 6),
    drafts=st.sampled_from(["chain", "tree"]),
    padding_requests=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_verify(prefixes: list[int], number: int, drafts: Any, padding_requests: int, seed: int) -> None:
    requests = [*((prefix, number) for prefix in prefixes), *[(0, 0)] * padding_requests]
    plan = check(make_mla_batch(requests, drafts=drafts, padding=padding_requests, seed=seed))
    assert plan.absorbed is not None
    assert not plan.expanded


@pytest.mark.sample(2)
@pytest.mark.parametrize(("waves", "num_splits"), [(0, 1), (1, 2), (3, 4)])
def test_splits_give_the_same(waves: int, num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, some, and more than a request has keys; more rows than a tile has."""
    choice = tuning.LatentChoice(16, 16, 4, 1, waves)
    monkeypatch.setattr(tuning, "latent_choices", lambda *args, **options: [choice])
    batch = make_mla_batch([(50, 6), (3, 2), (17, 1)], mode=ForwardMode.DRAFT_EXTEND)
    plan = check(batch)
    assert plan.absorbed is not None
    assert plan.absorbed.splits.num_splits == num_splits


def test_a_tile_of_many_rows_reads_latents_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And uses them as keys and as values."""
    monkeypatch.setattr(tuning, "latent_choices", lambda *args, **options: [tuning.LatentChoice(64, 16, 4, 1, 2)])
    check(make_mla_batch([(50, 6), (3, 2), (17, 1)], mode=ForwardMode.DRAFT_EXTEND))
    check(make_mla_batch([(20, 4), (9, 4)], drafts="tree"))


def test_lanes_equal_the_whole_batch() -> None:
    batch = make_mla_batch([(20, 1), (6, 9), (33, 1)], block_size=16)
    metadata, inputs = moved(batch.metadata), inputs_of(batch)
    attention = UBatchAttention(batch.shape, cache_of(batch), "triton")
    slices = [UBatchSlice(slice(0, 2), slice(0, 5)), UBatchSlice(slice(1, 3), slice(5, 11))]
    outs = []
    for plan, piece in zip(attention.plan_lanes(split_attn_metadata(slices, metadata)), slices, strict=True):
        assert isinstance(plan, TritonMLAPlan)
        rows = piece.token_slice
        names = ("q_nope", "q_rope", "latent", "k_rope")
        own = replace(inputs, **{name: getattr(inputs, name)[rows] for name in names})
        own = replace(own, rope=replace(inputs.rope, positions=inputs.rope.positions[rows]))
        outs.append(plan.forward(own, 0))
    torch.testing.assert_close(torch.cat(outs).cpu(), batch.expected(), atol=1e-5, rtol=1e-5)


def test_what_a_plan_is_given_must_fit_it() -> None:
    batch = make_mla_batch(DECODE)
    plan = backend_of(batch, cache_of(batch)).plan(moved(batch.metadata))
    inputs = inputs_of(batch)
    with pytest.raises(ConfigError, match="planned for 4 tokens and got 3"):
        plan.forward(replace(inputs, q_nope=inputs.q_nope[1:]), 0)


# ----------------------------------------------------------------------------------------------------------- graphs

LIMITS = GraphLimits(max_reqs=5, max_tokens=16, max_seq_len=80)

# What is captured, and what is replayed after it.
GRAPHS: dict[str, tuple[dict[str, Any], list[list[tuple[int, int]]]]] = {
    "decode": ({"mode": ForwardMode.DECODE}, [[(4, 1)] * 3, [(70, 1), (3, 1), (50, 1)], [(9, 1), (0, 0), (0, 0)]]),
    "chain": ({"drafts": "chain"}, [[(4, 3), (2, 3)], [(66, 3), (1, 3)], [(50, 3), (0, 0)]]),
    "tree": ({"drafts": "tree"}, [[(4, 3), (2, 3)], [(66, 3), (1, 3)], [(50, 3), (0, 0)]]),
    "draft extend": ({"mode": ForwardMode.DRAFT_EXTEND}, [[(4, 3), (9, 3)], [(60, 1), (40, 3)], [(8, 2), (3, 1)]]),
}


class Captured:
    """A plan for graphs, and the batches it has to serve, as large as the first one."""

    def __init__(self, kind: str) -> None:
        options, steps = GRAPHS[kind]
        rows = sum(new for _, new in steps[0])
        batches = [
            make_mla_batch(step, block_size=16, padding=rows - sum(new for _, new in step), seed=seed, **options)
            for seed, step in enumerate(steps)
        ]
        num_blocks = max(batch.num_blocks for batch in batches)
        self.batches = [replace(batch, num_blocks=num_blocks) for batch in batches]
        self.cache = MLAKVCache(batches[0].spec, num_blocks, DEVICE)
        self.backend = backend_of(batches[0], self.cache)
        with torch.inference_mode():
            self.backend.init_graph_buffers(LIMITS)
            self.plan = self.backend.plan_for_graph(moved(batches[0].metadata))

    def load(self, batch: MLABatch) -> None:
        """The cache becomes what the steps before this one left."""
        self.cache.pool.memory.copy_(cache_of(batch).pool.memory)


def addresses(plan: TritonMLAGraphPlan) -> dict[str, int]:
    batch = plan.captured.batch
    found = {"slots": plan.slots, "workspace": plan.captured.workspace}
    found |= {name: getattr(batch, name) for name in ("query_start_loc", "seq_lens", "block_table")}
    if batch.tree is not None:
        found |= {name: getattr(batch.tree, name) for name in ("mask", "offsets")}
    return {name: tensor.data_ptr() for name, tensor in found.items()}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_captured_plan_serves_longer_and_other_batches_in_place(kind: str) -> None:
    captured = Captured(kind)
    plan, where, size = captured.plan, addresses(captured.plan), captured.backend.nbytes
    for batch in captured.batches:
        captured.load(batch)
        metadata = moved(batch.metadata)
        with CountAllocations() as counted:
            captured.backend.replan(plan, metadata)
        assert counted.allocating == []
        assert addresses(plan) == where
        out = plan.forward(inputs_of(batch), 0)
        torch.testing.assert_close(out.cpu(), batch.expected(), atol=1e-5, rtol=1e-5)
    assert captured.backend.nbytes == size


def test_a_graph_refuses_what_it_was_not_captured_for() -> None:
    batch = make_mla_batch(DECODE, block_size=16)
    backend = backend_of(batch, cache_of(batch))
    with pytest.raises(ConfigError, match="init_graph_buffers"):
        backend.plan_for_graph(moved(batch.metadata))
    backend.init_graph_buffers(LIMITS)
    with pytest.raises(ConfigError, match="captures decode, verify and draft-extend batches, not prefill"):
        backend.plan_for_graph(moved(make_mla_batch([(0, 4)], block_size=16).metadata))
    plan = backend.plan_for_graph(moved(batch.metadata))
    for requests, complaint in (
        ([*DECODE, (4, 1)], "4 requests and 4 tokens cannot run a batch of 5 and 5"),
        ([(4, 3), (5, 1), (0, 0), (0, 0)], "1 tokens per request cannot run a batch with 3"),
        ([(80, 1)] * 4, "81 tokens in a request exceeds"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            backend.replan(plan, moved(make_mla_batch(requests, block_size=16).metadata))


# --------------------------------------------------------------------------------------- what the interpreter cannot


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [16, 128])
def test_real_sizes_compiled(dtype: torch.dtype, heads: int) -> None:
    """Against the float32 reference over the same rounded inputs."""
    shape = replace(DEEPSEEK, num_heads=heads)
    check(make_mla_batch([(1000, 1), (37, 1), (513, 1)], shape=shape, block_size=64), dtype)
    check(make_mla_batch([(0, 70), (129, 40), (700, 1)], shape=shape, block_size=64, padding=5), dtype)
    check(make_mla_batch([(200, 4), (64, 4)], shape=shape, block_size=64, drafts="tree"), dtype)


@pytest.mark.gpu
def test_every_tile_compiled() -> None:
    """Whatever tuning chooses gives the same."""
    batch = make_mla_batch([(700, 2), (33, 2)], shape=replace(DEEPSEEK, num_heads=64), block_size=64, drafts="chain")
    batch = batch.to(torch.bfloat16).to(torch.float32)
    expected = batch.expected()
    for choice in tuning.latent_choices(batch.shape, 2, torch.bfloat16, fp8=False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "latent_choices", lambda *args, choice=choice, **options: [choice])
            plan = backend_of(batch, cache_of(batch, torch.bfloat16)).plan(moved(batch.metadata))
        out = plan.forward(inputs_of(batch, torch.bfloat16), 0)
        torch.testing.assert_close(out.cpu().float(), expected, atol=4e-2, rtol=4e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_cuda_graph_replays_longer_batches(kind: str) -> None:
    captured = Captured(kind)
    static = inputs_of(captured.batches[0])
    captured.plan.forward(static, 0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.plan.forward(static, 0)
    for batch in captured.batches:
        captured.load(batch)
        fresh = inputs_of(batch)
        pairs: list[tuple[Tensor, Tensor]] = [
            (getattr(static, name), getattr(fresh, name))
            for name in ("q_nope", "q_rope", "latent", "k_rope", "w_uk", "w_uv")
        ]
        for target, source in (*pairs, (static.rope.positions, fresh.rope.positions)):
            target.copy_(source)
        captured.backend.replan(captured.plan, moved(batch.metadata))
        graph.replay()
        torch.testing.assert_close(out.cpu(), batch.expected(), atol=1e-5, rtol=1e-4)


def test_tiles_hold_whole_rows_of_queries_and_heads() -> None:
    for heads, queries in ((1, 1), (16, 1), (128, 1), (3, 7)):
        shape = replace(DEEPSEEK, num_heads=heads)
        for dtype in (torch.float32, torch.bfloat16):
            tile = LatentTile.default(shape, queries, dtype, fp8=False)
            assert (
                tile.blocks(shape, queries) * tile.rows
                >= heads * queries
                > (tile.blocks(shape, queries) - 1) * tile.rows
            )


# ------------------------------------------------------------------------------------- for back ends without a kernel


@pytest.mark.parametrize("fused", [False, True])
def test_new_tokens_are_stored_in_one_kernel_where_there_is_one(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the back ends on flashinfer's kernels; the same cache either way."""
    monkeypatch.setattr(store, "_fuses", lambda cache: fused)
    mla, mha = make_mla_batch([(3, 2), (9, 1)], padding=1), make_batch([(3, 2), (9, 1)], padding=1)
    latents, keys = cache_of(mla), moved_cache(mha)
    expected_latents, expected_keys = mla.new_cache(), mha.new_cache()
    store.store_latents(latents, 0, inputs_of(mla), latents.write_slots(mla.metadata.slot_mapping.to(DEVICE)))
    slots = keys.write_slots(mha.metadata.slot_mapping.to(DEVICE))
    store.store_kv(keys, 0, mha.k.to(DEVICE), mha.v.to(DEVICE), slots)
    mla.expected(0, expected_latents)
    mha.expected(0, expected_keys)
    torch.testing.assert_close(latents.rows(0).cpu(), expected_latents.rows(0))
    assert torch.equal(keys.keys(0).cpu(), expected_keys.keys(0))
    assert torch.equal(keys.values(0).cpu(), expected_keys.values(0))
