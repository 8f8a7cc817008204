"""The `flashinfer` back ends in graphs: captured once, replayed for other batches, on stand-ins for its wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_batches import Batch, MLABatch
from flashinfer_cases import LIMITS, MIXED, install, make, padded, run
from flashinfer_standin import StandIns, allocations

from attention import AttentionShape, MLAKVCache, PagedKVCache, make_attention_backend
from ubatch import ConfigError, ForwardMode

pytestmark = pytest.mark.long

BOTH = pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
GRAPHS: dict[str, tuple[int, dict[str, Any], list[tuple[int, int]], list[tuple[int, int]]]] = {
    "decode": (1, {"mode": ForwardMode.DECODE}, [(5, 1), (20, 1), (9, 1), (2, 1)], [(70, 1), (33, 1), (95, 1)]),
    "chain": (3, {"drafts": "chain"}, [(5, 3), (20, 3), (9, 3), (2, 3)], [(70, 3), (93, 3)]),
    "tree": (3, {"drafts": "tree"}, [(5, 3), (20, 3), (9, 3), (2, 3)], [(70, 3), (93, 3)]),
    "tree of one": (1, {"drafts": "tree"}, [(5, 1), (20, 1)], [(70, 1)]),
    "draft extend": (
        3, {"mode": ForwardMode.DRAFT_EXTEND}, [(5, 3), (20, 1), (9, 2), (2, 3)], [(70, 1), (95, 1), (40, 2)],
    ),
}  # fmt: skip
CASES = [*((kind, False) for kind in GRAPHS), *((kind, True) for kind in GRAPHS if "tree" not in kind)]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Stand-ins in flashinfer's place."""
    standins = StandIns()
    install(monkeypatch, standins.find)
    return standins


def refill(cache: PagedKVCache | MLAKVCache, batch: Batch | MLABatch) -> None:
    for pool in cache._pools:
        pool.memory.zero_()
    if isinstance(batch, MLABatch):
        cache.write(0, batch.past_latent, batch.past_k_rope, batch.past_slots)
    else:
        cache.write(0, batch.past_k, batch.past_v, batch.past_slots)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("kind", "mla", "window"), [*((*case, None) for case in CASES), *((kind, False, 2) for kind in GRAPHS)]
)
def test_a_replay_longer_than_the_capture(kernels: StandIns, kind: str, mla: bool, window: int | None) -> None:
    """The captured wrapper, over the buffers it was given, computes the later batch."""
    num_queries, options, first, second = GRAPHS[kind]
    if window is not None:
        options = {**options, "shape": AttentionShape(4, 2, 8, sliding_window=window)}
    captured, later = (
        padded(requests, num_queries, mla=mla, seed=seed, **options) for seed, requests in enumerate((first, second))
    )
    cache = (MLAKVCache if mla else PagedKVCache)(captured.spec, max(captured.num_blocks, later.num_blocks))
    backend = make_attention_backend("flashinfer", captured.shape, cache)
    with torch.inference_mode():  # as a runner captures; what it made must serve everybody
        backend.init_graph_buffers(LIMITS)
        plan = backend.plan_for_graph(captured.metadata)
    buffers = plan.wrapper.wrapper.buffers()
    idle = padded([], num_queries, mla=mla)
    for batch in (captured, later, idle, captured):
        refill(cache, batch)
        backend.replan(plan, batch.metadata)
        torch.testing.assert_close(run(plan, batch), batch.expected(), atol=1e-5, rtol=1e-5)
    assert plan.wrapper.wrapper.buffers() == buffers


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "mla"), CASES)
def test_replan_allocates_nothing(kernels: StandIns, kind: str, mla: bool) -> None:
    """But for the mask of a tree, which is completed for the requests of padding, and packed."""
    num_queries, options, first, second = GRAPHS[kind]
    captured, later = (padded(requests, num_queries, mla=mla, **options) for requests in (first, second))
    cache = (MLAKVCache if mla else PagedKVCache)(captured.spec, 64)
    backend = make_attention_backend("flashinfer", captured.shape, cache)
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(captured.metadata)
    before = backend.nbytes
    with allocations() as count:
        backend.replan(plan, later.metadata)
    assert (count() > 0) is ("tree" in kind)
    assert backend.nbytes == before


@BOTH
def test_graph_buffers_hold_the_largest_step(kernels: StandIns, mla: bool) -> None:
    """Every request as long as it may be, and one query of four: the rest is padding, which takes pages, too."""
    requests = [(LIMITS.max_seq_len - 1, 1)] * LIMITS.max_reqs
    batch = make(requests, padding=18, mla=mla, block_size=1, mode=ForwardMode.DRAFT_EXTEND)
    backend = make_attention_backend("flashinfer", batch.shape, batch.new_cache())
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(batch.metadata)
    torch.testing.assert_close(run(plan, batch), batch.expected(), atol=1e-5, rtol=1e-5)


@BOTH
def test_what_a_graph_cannot_run_is_refused(kernels: StandIns, mla: bool) -> None:
    chain, tree = (padded([(5, 3)], 3, drafts=drafts, mla=mla) for drafts in ("chain", "tree"))
    backend = make_attention_backend("flashinfer", chain.shape, chain.new_cache())
    with pytest.raises(ConfigError, match="init_graph_buffers"):
        backend.plan_for_graph(chain.metadata)
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(chain.metadata)
    with pytest.raises(ConfigError, match="no tree mask" if mla else "without a tree mask"):
        backend.replan(plan, tree.metadata)
    with pytest.raises(ConfigError, match="queries per request"):
        backend.replan(plan, padded([(5, 4)], 4, mode=ForwardMode.DRAFT_EXTEND, mla=mla).metadata)
    with pytest.raises(ConfigError, match="not mixed"):
        backend.plan_for_graph(make(MIXED, mla=mla).metadata)
    with pytest.raises(ConfigError, match="init_graph_buffers"):
        backend.replan(backend.plan(chain.metadata), chain.metadata)
