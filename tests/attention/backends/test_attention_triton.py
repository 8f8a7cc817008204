"""The `triton` back end against the plain reference: every kind of batch, every option, plain and captured.

Without a GPU batches are small. With one, the same tests run compiled, and the ones marked `gpu` add half precision,
real sizes and CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from allocations import CountAllocations
from attention_batches import Batch, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_batches import DEVICE, moved, moved_cache, numbers

from attention import (
    AttentionShape,
    GraphLimits,
    PagedKVCache,
    UBatchAttention,
    make_attention_backend,
    split_attn_metadata,
)
from attention.backends.triton.mha import TritonAttentionBackend, TritonAttentionPlan, TritonGraphPlan
from attention.kernels import decode as decode_kernels
from attention.kernels.decode import DecodeSplits
from ubatch import ConfigError, ForwardMode, UBatchSlice
from ubatch.kernels.triton_jit import INTERPRETED

CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

DECODE = [(5, 1), (33, 1), (0, 1), (18, 1)]
PROMPTS = [(0, 5), (0, 17), (0, 2)]
CHUNKS = [(19, 9), (3, 2)]
MIXED = [(9, 4), (0, 7), (21, 1), (0, 0), (2, 1)]


@pytest.fixture(autouse=True, scope="module")
def _short_splits() -> Iterator[None]:
    """Requests are short, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernels, "MIN_KEYS_PER_SPLIT", 16)
        yield


def rounded(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with numbers that `dtype` has: the reference computes in float32, but from the same ones."""
    if dtype == torch.float32:
        return batch
    names = ("q", "k", "v", "past_k", "past_v")
    return replace(batch, **{name: getattr(batch, name).to(dtype).float() for name in names})


def forward(plan: TritonAttentionPlan, batch: Batch, layer: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    q, k, v = (x.to(device=DEVICE, dtype=dtype) for x in (batch.q, batch.k, batch.v))
    return plan.forward(q, k, v, layer, None if batch.sinks is None else batch.sinks.to(DEVICE))


def backend_of(batch: Batch, cache: PagedKVCache) -> TritonAttentionBackend:
    backend = make_attention_backend("triton", batch.shape, cache)
    assert isinstance(backend, TritonAttentionBackend)
    return backend


def check(batch: Batch, dtype: torch.dtype = torch.float32) -> TritonAttentionPlan:
    """Output and cache are the reference's."""
    batch = rounded(batch, dtype)
    cache, expected_cache = moved_cache(batch, dtype), batch.new_cache()
    plan = backend_of(batch, cache).plan(moved(batch.metadata))
    for layer in range(batch.spec.num_layers):
        out = forward(plan, batch, layer, dtype)
        expected = batch.expected(layer, expected_cache)
        assert out.dtype == dtype
        assert out.is_contiguous()
        torch.testing.assert_close(out.cpu().float(), expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])
        if DEVICE == "cpu" and dtype == torch.float32:
            assert torch.equal(numbers(cache.keys(layer)), numbers(expected_cache.keys(layer)))
            assert torch.equal(numbers(cache.values(layer)), numbers(expected_cache.values(layer)))
    return plan


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("requests", "decodes", "prefills"),
    [(DECODE, True, False), (PROMPTS, False, True), (CHUNKS, False, True), (MIXED, True, True), ([], False, False)],
    ids=["decode", "prompts", "behind a prefix", "mixed", "nothing"],
)
def test_equals_the_reference_and_launches_only_what_the_batch_has(
    requests: list[tuple[int, int]], decodes: bool, prefills: bool
) -> None:
    plan = check(make_batch(requests, num_layers=2, padding=2))
    assert (plan.splits is not None, plan.tiles is not None) == (decodes, prefills)
    in_tiles = set() if plan.tiles is None else {request for request, _ in plan.tiles.tolist() if request >= 0}
    assert in_tiles == {request for request, (_, new) in enumerate(requests) if new > 1}


@pytest.mark.sample(2)
@pytest.mark.parametrize("heads", [(2, 2, 8), (6, 1, 24), (40, 2, 16)], ids=["mha", "mqa", "wide groups"])
def test_heads_of_every_kind(heads: tuple[int, int, int]) -> None:
    check(make_batch([(9, 1), (4, 5)], heads=heads))


@pytest.mark.sample(3)
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_page_sizes(block_size: int, fp8: bool) -> None:
    check(make_batch([(70, 1), (63, 2), (0, 18), (15, 1)], block_size=block_size, fp8=fp8, padding=1))


@pytest.mark.sample(4)
@pytest.mark.parametrize("drafts", ["chain", "tree"])
@pytest.mark.parametrize("number", [3, 20])
def test_verify(drafts: Any, number: int) -> None:
    """A few drafts are decoded; with many, a request no longer fits one tile."""
    heads = (4, 2, 8) if number == 3 else (16, 2, 8)
    plan = check(make_batch([(17, number), (2, number), (0, 0)], heads=heads, drafts=drafts, padding=1))
    assert (plan.tiles is None) == (number == 3)


OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.9},
    "window": {"sliding_window": 5},
    "window of one": {"sliding_window": 1},
    "soft cap": {"soft_cap": 0.7},
    "sinks": {"sinks": True},
    "all": {"scale": 0.5, "sliding_window": 20, "soft_cap": 2.0, "sinks": True},
}
VALUES: dict[str, dict[str, Any]] = {
    "narrow values": {"v_head_dim": 5},
    "wide values": {"v_head_dim": 40, "sliding_window": 9, "sinks": True},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_in_decode_prefill_and_verify_and_none_is_ignored(name: str) -> None:
    shape, plain = AttentionShape(4, 2, 8, **OPTIONS[name]), AttentionShape(4, 2, 8)
    for batch in (
        make_batch([(44, 1), (22, 5), (3, 1)], shape=shape),
        make_batch([(23, 4), (1, 4)], shape=shape, drafts="tree"),
    ):
        check(batch)
        without = replace(batch, shape=plain, sinks=None).expected()
        assert (batch.expected() - without).abs().max() > 1e-3  # the batch would notice


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("fp8", [False, True])
def test_value_heads_of_another_size(name: str, fp8: bool) -> None:
    shape = AttentionShape(4, 2, 8, **VALUES[name])
    check(make_batch([(300, 1), (22, 5), (3, 1), (0, 4)], shape=shape, fp8=fp8, padding=1))
    check(make_batch([(23, 4), (1, 4)], shape=shape, drafts="tree", fp8=fp8))


@pytest.mark.sample(5)
@pytest.mark.parametrize("num_heads", [4, 16], ids=["decoded", "in tiles"])
@pytest.mark.parametrize("window", [2, 6])
def test_a_window_in_a_tree_goes_by_depth(window: int, num_heads: int) -> None:
    """A draft's parent may lie many places before it, and is still next to it."""
    batch = make_batch([(9, 20)], shape=AttentionShape(num_heads, 2, 8, sliding_window=window), drafts="tree")
    plan = check(batch)
    assert (plan.tiles is None) == (num_heads == 4)


@settings(max_examples=8)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7)), max_size=5),
    name=st.sampled_from(sorted(OPTIONS | VALUES)),
    mode=st.sampled_from([None, ForwardMode.DRAFT_EXTEND]),
    fp8=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
    padding=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_any_batch_with_any_option(
    requests: list[tuple[int, int]],
    name: str,
    mode: ForwardMode | None,
    fp8: bool,
    block_size: int,
    padding: int,
    seed: int,
) -> None:
    requests = [(prefix if new else 0, new) for prefix, new in requests]
    shape = AttentionShape(4, 2, 8, **(OPTIONS | VALUES)[name])
    check(make_batch(requests, shape=shape, mode=mode, fp8=fp8, block_size=block_size, padding=padding, seed=seed))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    check(make_batch(MIXED, heads=(4, 2, 16)), dtype)


def test_lanes_that_cut_a_request_equal_the_whole_batch() -> None:
    """Lane 0's keys are lane 1's prefix; each lane has a back end, and so a workspace, of its own."""
    batch = make_batch([(20, 1), (6, 9), (33, 1)], block_size=16)
    cache, metadata = moved_cache(batch), moved(batch.metadata)
    attention = UBatchAttention(batch.shape, cache, "triton")
    slices = [UBatchSlice(slice(0, 2), slice(0, 5)), UBatchSlice(slice(1, 3), slice(5, 11))]
    plans = attention.plan_lanes(split_attn_metadata(slices, metadata))
    outs = []
    for plan, piece in zip(plans, slices, strict=True):
        assert isinstance(plan, TritonAttentionPlan)
        q, k, v = (x[piece.token_slice].to(DEVICE) for x in (batch.q, batch.k, batch.v))
        outs.append(plan.forward(q, k, v, 0))
    torch.testing.assert_close(torch.cat(outs).cpu(), batch.expected(), atol=1e-5, rtol=1e-5)
    memory = attention.memory()
    assert memory["lane 0/triton"] > 0
    assert memory["lane 1/triton"] > 0
    assert memory["whole/triton"] == 0


def test_what_a_plan_is_given_must_fit_it() -> None:
    batch = make_batch(DECODE)
    plan = backend_of(batch, moved_cache(batch)).plan(moved(batch.metadata))
    q, k, v = (x.to(DEVICE) for x in (batch.q, batch.k, batch.v))
    with pytest.raises(ConfigError, match="planned for 4 tokens and got 3"):
        plan.forward(q[1:], k[1:], v[1:], 0)
    with pytest.raises(ConfigError, match=r"sinks is False, but sinks were given"):
        plan.forward(q, k, v, 0, torch.zeros(4, device=DEVICE))


def test_a_cpu_is_served_by_the_interpreter_only() -> None:
    assert ("cpu" in TritonAttentionBackend.traits.devices) == INTERPRETED


def test_the_workspace_is_made_with_the_first_plan_and_kept_for_smaller_ones() -> None:
    batch = make_batch(DECODE)
    backend = backend_of(batch, moved_cache(batch))
    assert backend.nbytes == 0
    plan = backend.plan(moved(batch.metadata))
    made = backend.nbytes
    assert plan.splits is not None
    assert made == 4 * plan.splits.workspace_numbers(batch.shape, len(DECODE)) > 0
    assert not plan.workspace.any()
    smaller = backend.plan(moved(make_batch(DECODE[:2]).metadata))
    assert smaller.workspace.data_ptr() == plan.workspace.data_ptr()
    assert backend.nbytes == made


@pytest.mark.parametrize(
    ("num_reqs", "max_seq_len", "window", "expected"),
    [(1, 4096, None, 32), (1, 64, None, 4), (8, 4096, None, 4), (64, 4096, None, 1), (1, 4096, 50, 4), (0, 0, None, 1)],
    ids=["long", "short", "several", "many", "window", "nothing"],
)
def test_keys_are_split_as_long_as_there_are_programs_to_run_them(
    num_reqs: int, max_seq_len: int, window: int | None, expected: int
) -> None:
    shape = AttentionShape(8, 2, 8, sliding_window=window)
    assert DecodeSplits.choose(shape, num_reqs, 1, max_seq_len, 64).num_splits == expected


# ----------------------------------------------------------------------------------------------------------- graphs

LIMITS = GraphLimits(max_reqs=5, max_tokens=16, max_seq_len=80)

# What is captured, the shortest of all, and what is replayed after it.
GRAPHS: dict[str, tuple[dict[str, Any], list[list[tuple[int, int]]]]] = {
    "decode": ({}, [[(4, 1)] * 3, [(70, 1), (3, 1), (50, 1)], [(9, 1), (0, 0), (0, 0)]]),
    "chain": ({"drafts": "chain"}, [[(4, 3), (2, 3)], [(66, 3), (1, 3)], [(50, 3), (0, 0)]]),
    "tree": ({"drafts": "tree"}, [[(4, 3), (2, 3)], [(66, 3), (1, 3)], [(50, 3), (0, 0)]]),
    "draft extend": ({"mode": ForwardMode.DRAFT_EXTEND}, [[(4, 3), (9, 3)], [(60, 1), (40, 5)], [(8, 4), (3, 1)]]),
    "prompts": ({"mode": ForwardMode.PREFILL}, [[(0, 5), (3, 6)], [(0, 1), (64, 10)], [(7, 9), (0, 0)]]),
}


class Captured:
    """A plan for graphs, and the batches it has to serve, as large as the first one."""

    def __init__(self, kind: str) -> None:
        options, steps = GRAPHS[kind]
        rows = sum(new for _, new in steps[0])
        batches = [
            make_batch(step, block_size=16, padding=rows - sum(new for _, new in step), seed=seed, **options)
            for seed, step in enumerate(steps)
        ]
        num_blocks = max(batch.num_blocks for batch in batches)
        self.batches = [replace(batch, num_blocks=num_blocks) for batch in batches]
        self.cache = PagedKVCache(batches[0].spec, num_blocks, DEVICE)
        self.backend = backend_of(batches[0], self.cache)
        with torch.inference_mode():  # as a runner captures; what it made must serve everybody
            self.backend.init_graph_buffers(LIMITS)
            self.plan = self.backend.plan_for_graph(moved(batches[0].metadata))

    def load(self, batch: Batch) -> None:
        """The cache becomes what the steps before this one left."""
        past = moved_cache(batch)
        self.cache.key_pool.memory.copy_(past.key_pool.memory)
        self.cache.value_pool.memory.copy_(past.value_pool.memory)


def addresses(plan: TritonGraphPlan) -> dict[str, int]:
    """Where every tensor lies that a plan's kernels read."""
    found = {"slots": plan.slots, "workspace": plan.workspace, "tiles": plan.tiles}
    found |= {name: getattr(plan.batch, name) for name in ("query_start_loc", "seq_lens", "block_table")}
    if plan.batch.tree is not None:
        found |= {name: getattr(plan.batch.tree, name) for name in ("mask", "offsets", "positions")}
    return {name: tensor.data_ptr() for name, tensor in found.items() if tensor is not None}


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_captured_plan_serves_longer_and_other_batches_in_place(kind: str) -> None:
    """As a graph replays: the same launches over the same addresses."""
    captured = Captured(kind)
    plan, backend = captured.plan, captured.backend
    launches, where, size = (plan.splits, plan.tiles), addresses(plan), backend.nbytes
    for batch in captured.batches:
        captured.load(batch)
        metadata = moved(batch.metadata)
        with CountAllocations() as counted:
            backend.replan(plan, metadata)
        assert counted.allocating == []
        assert addresses(plan) == where
        assert (plan.splits, plan.tiles) == launches
        torch.testing.assert_close(forward(plan, batch).cpu(), batch.expected(), atol=1e-5, rtol=1e-5)
    assert backend.nbytes == size


def test_graph_scalars_are_chosen_for_the_longest_request_the_limits_allow() -> None:
    batch = make_batch([(4, 1)], block_size=16)
    backend = backend_of(batch, moved_cache(batch))
    backend.init_graph_buffers(LIMITS)
    eager, captured = backend.plan(moved(batch.metadata)), backend.plan_for_graph(moved(batch.metadata))
    assert eager.splits is not None
    assert captured.splits is not None
    assert eager.splits.num_splits == 1
    assert captured.splits.num_splits == LIMITS.max_seq_len // 16


def test_captured_plans_keep_their_workspace_when_it_grows() -> None:
    small, large = make_batch([(4, 1)], block_size=16), make_batch([(4, 1)] * 5, block_size=16)
    backend = backend_of(large, moved_cache(large))
    backend.init_graph_buffers(LIMITS)
    first = backend.plan_for_graph(moved(small.metadata))
    before, where = backend.nbytes, first.workspace.data_ptr()
    second = backend.plan_for_graph(moved(large.metadata))
    assert first.workspace.data_ptr() == where != second.workspace.data_ptr()
    assert backend.nbytes == before + second.workspace.nbytes
    del first
    assert backend.nbytes < before + second.workspace.nbytes


def test_a_graph_refuses_what_it_was_not_captured_for() -> None:
    batch = make_batch(DECODE, block_size=16)
    backend = backend_of(batch, moved_cache(batch))
    with pytest.raises(ConfigError, match="init_graph_buffers"):
        backend.plan_for_graph(moved(batch.metadata))
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(moved(batch.metadata))

    def refused(requests: list[tuple[int, int]], complaint: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=complaint):
            backend.replan(plan, moved(make_batch(requests, block_size=16, **options).metadata))

    refused([*DECODE, (4, 1)], "4 requests and 4 tokens cannot run a batch of 5 and 5")
    refused([(4, 3), (5, 1), (0, 0), (0, 0)], "1 tokens per request cannot run a batch with 3")
    refused([(80, 1)] * 4, "81 tokens in a request exceeds")
    refused([(4, 1)] * 4, "captured without a tree mask", drafts="tree")
    with pytest.raises(ConfigError, match="6 requests exceeds"):
        backend.plan_for_graph(moved(make_batch([(4, 1)] * 6, block_size=16).metadata))
    tree = backend.plan_for_graph(moved(make_batch([(4, 2)], block_size=16, drafts="tree").metadata))
    with pytest.raises(ConfigError, match="captured with a tree mask"):
        backend.replan(tree, moved(make_batch([(4, 2)], block_size=16, drafts="chain").metadata))


# --------------------------------------------------------------------------------------- what the interpreter cannot


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_real_sizes_compiled(dtype: torch.dtype, fp8: bool, head_dim: int) -> None:
    """Against the float32 reference over the same rounded inputs."""
    options = {"heads": (16, 4, head_dim), "block_size": 16, "fp8": fp8}
    check(make_batch([(1000, 1), (37, 1), (513, 1)], **options), dtype)  # type: ignore[arg-type]
    check(make_batch([(0, 70), (129, 40), (700, 1)], padding=5, **options), dtype)  # type: ignore[arg-type]
    check(make_batch([(200, 8), (64, 8)], drafts="tree", **options), dtype)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_option_compiled(dtype: torch.dtype) -> None:
    shape = AttentionShape(16, 2, 64, scale=0.2, sliding_window=100, soft_cap=5.0, sinks=True)
    check(make_batch([(300, 1), (150, 90), (0, 33)], shape=shape, block_size=64), dtype)
    check(make_batch([(300, 6), (20, 6)], shape=shape, drafts="tree"), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_cuda_graph_replays_longer_batches(kind: str) -> None:
    captured = Captured(kind)
    first = captured.batches[0]
    q, k, v = (x.to(DEVICE).clone() for x in (first.q, first.k, first.v))
    captured.plan.forward(q, k, v, 0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.plan.forward(q, k, v, 0)
    for batch in captured.batches:
        captured.load(batch)
        for static, fresh in ((q, batch.q), (k, batch.k), (v, batch.v)):
            static.copy_(fresh)
        metadata = moved(batch.metadata)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        captured.backend.replan(captured.plan, metadata)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        graph.replay()
        torch.testing.assert_close(out.cpu(), batch.expected(), atol=1e-5, rtol=1e-4)
