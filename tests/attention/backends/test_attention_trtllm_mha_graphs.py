"""The `trtllm_mha` back end in graphs: captured once, replayed for other batches, on stand-ins for flashinfer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_batches import Batch, make_batch
from flashinfer_standin import StandIns
from trtllm_cases import check_replan_allocates_nothing, check_same_call, install
from trtllm_mha_cases import backend_of, fp8_queries

from attention import GraphLimits, PagedKVCache, UBatchAttention, split_attn_metadata
from attention.backends.trtllm import mha as trtllm_mha
from attention.backends.trtllm.mha import TRTLLMMHABackend
from ubatch import ConfigError, ForwardMode, split_fixed

LIMITS = GraphLimits(max_reqs=6, max_tokens=24, max_seq_len=96)
GRAPHS = {
    "decode": (1, {"mode": ForwardMode.DECODE}, [(5, 1), (20, 1), (9, 1), (2, 1)], [(70, 1), (33, 1), (95, 1)]),
    "verify": (3, {"drafts": "chain"}, [(5, 3), (20, 3), (9, 3), (2, 3)], [(70, 3), (93, 3)]),
    "draft extend": (
        3, {"mode": ForwardMode.DRAFT_EXTEND}, [(5, 3), (20, 1), (9, 2), (2, 3)], [(70, 1), (93, 3), (40, 2)],
    ),
}  # fmt: skip


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return install(monkeypatch, trtllm_mha, TRTLLMMHABackend)


def padded(requests: list[tuple[int, int]], num_reqs: int, num_queries: int, **options: object) -> Batch:
    """A batch as a runner pads it for a graph."""
    rows = sum(new for _, new in requests)
    return make_batch(
        requests + [(0, 0)] * (num_reqs - len(requests)),
        block_size=16,
        padding=num_reqs * num_queries - rows,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_replay_longer_than_the_capture(kernels: StandIns, kind: str, fp8: bool) -> None:
    """The captured call, with its tensors and scalars as they were, computes the later batch."""
    num_queries, options, first, second = GRAPHS[kind]
    captured = fp8_queries(padded(first, 4, num_queries, fp8=fp8, **options))
    later = fp8_queries(padded(second, 4, num_queries, fp8=fp8, seed=1, **options))
    cache = PagedKVCache(captured.spec, max(captured.num_blocks, later.num_blocks))
    backend = backend_of(captured, cache)
    with torch.inference_mode():  # as a runner captures; what it made must serve everybody
        backend.init_graph_buffers(LIMITS)
        plan = backend.plan_for_graph(captured.metadata)
    idle = padded([], 4, num_queries, fp8=fp8)
    for batch in (captured, later, idle, captured):
        cache.key_pool.memory.zero_()
        cache.value_pool.memory.zero_()
        cache.write(0, batch.past_k, batch.past_v, batch.past_slots)
        backend.replan(plan, batch.metadata)
        out = plan.forward(batch.q, batch.k, batch.v, 0)
        expected = replace(batch, num_blocks=cache.num_blocks).expected(0, _unscaled(batch, cache.num_blocks))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    first_call, second_call = (call.arguments for call in kernels.calls[:2])
    check_same_call(first_call, second_call)


def _unscaled(batch: Batch, num_blocks: int) -> PagedKVCache:
    """A cache with the batch's prefixes and scales of 1."""
    cache = PagedKVCache(batch.spec, num_blocks)
    cache.write(0, batch.past_k, batch.past_v, batch.past_slots)
    return cache


@pytest.mark.parametrize(("num_queries", "drafts"), [(1, None), (3, "chain")])
def test_a_batch_of_padding_may_be_captured(kernels: StandIns, num_queries: int, drafts: str | None) -> None:
    """As warm-up does, before there is any request; an idle batch has the shapes of what it is padded to."""
    batch = padded([(9, num_queries), (30, num_queries)], 4, num_queries, drafts=drafts)
    backend = backend_of(batch, batch.new_cache())
    backend.init_graph_buffers(LIMITS)
    idle = padded([], 4, num_queries).metadata
    assert idle.mode is ForwardMode.IDLE
    plan = backend.plan_for_graph(idle)
    backend.replan(plan, batch.metadata)
    torch.testing.assert_close(plan.forward(batch.q, batch.k, batch.v, 0), batch.expected(), atol=2e-6, rtol=2e-6)


def test_lanes_of_a_captured_verify_batch(kernels: StandIns) -> None:
    """Nine requests of three drafts: the second lane has five requests, and more than half of the tokens."""
    short, long = (make_batch([(n, 3)] * 9, block_size=16, drafts="chain", seed=n) for n in (5, 90))
    cache = PagedKVCache(short.spec, long.num_blocks)
    attention = UBatchAttention(short.shape, cache, "trtllm_mha")
    attention.init_graph_buffers(GraphLimits(max_reqs=9, max_tokens=27, max_seq_len=96), num_lanes=2)
    slices = split_fixed(9, 3)
    backends = [attention.backend(short.metadata, lane) for lane in range(2)]
    captured = split_attn_metadata(slices, short.metadata)
    plans = [backend.plan_for_graph(lane) for backend, lane in zip(backends, captured, strict=True)]
    cache.write(0, long.past_k, long.past_v, long.past_slots)
    outs = []
    replayed = split_attn_metadata(slices, long.metadata)
    for number, (backend, plan, lane) in enumerate(zip(backends, plans, replayed, strict=True)):
        kernels.lane = f"lane {number}"
        backend.replan(plan, lane)
        rows = slices[number].token_slice
        outs.append(plan.forward(long.q[rows], long.k[rows], long.v[rows], 0))
    torch.testing.assert_close(torch.cat(outs), long.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", GRAPHS)
def test_replan_allocates_nothing(kernels: StandIns, kind: str) -> None:
    num_queries, options, first, second = GRAPHS[kind]
    captured, later = (padded(requests, 4, num_queries, **options) for requests in (first, second))
    backend = backend_of(captured, PagedKVCache(captured.spec, 64))
    check_replan_allocates_nothing(backend, LIMITS, captured, later)


def test_captured_scalars_are_the_worst_case(kernels: StandIns) -> None:
    batch = padded([(5, 1), (2, 1)], 2, 1, mode=ForwardMode.DECODE)
    cache = batch.new_cache()
    backend = backend_of(batch, cache)
    backend.init_graph_buffers(LIMITS)
    backend.plan_for_graph(batch.metadata).forward(batch.q, batch.k, batch.v, 0)
    assert kernels.calls[0].arguments["max_seq_len"] >= LIMITS.max_seq_len


def test_what_a_graph_cannot_run_is_refused(kernels: StandIns) -> None:
    batch = padded([(5, 1), (2, 1)], 2, 1, mode=ForwardMode.DECODE)
    backend = backend_of(batch, batch.new_cache())
    with pytest.raises(ConfigError, match="init_graph_buffers"):
        backend.plan_for_graph(batch.metadata)
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(batch.metadata)
    for other, message in (
        (padded([(5, 1)] * 3, 3, 1, mode=ForwardMode.DECODE), "requests"),
        (padded([(5, 2)] * 2, 2, 2, mode=ForwardMode.DRAFT_EXTEND), "queries per request"),
        (padded([(100, 1)], 2, 1, mode=ForwardMode.DECODE), "request of 101 tokens"),
        (make_batch([(0, 0), (5, 1)], block_size=16, padding=1, mode=ForwardMode.DECODE), "come last"),
    ):
        with pytest.raises(ConfigError, match=message):
            backend.replan(plan, other.metadata)
    with pytest.raises(ConfigError, match="not prefill"):
        backend.plan_for_graph(make_batch([(0, 4)], block_size=16).metadata)
    with pytest.raises(ConfigError, match="padded to 1 rows"):
        backend.plan_for_graph(make_batch([(4, 1)], block_size=16, padding=1).metadata)
    with pytest.raises(ConfigError, match="raise the limits"):
        backend.plan_for_graph(padded([(5, 1)] * 7, 7, 1, mode=ForwardMode.DECODE).metadata)
