"""Several new tokens per request by the `native` back end: against `torch`, and to the last bit against itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention_batches import Batch, make_batch
from c_kernels import KINDS, needs_c, use_instructions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention import AttentionShape, make_attention_backend, split_attn_metadata
from attention.backends.native import mha as native
from ubatch import UBatchSlice

pytestmark = [needs_c, pytest.mark.long]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind: str = request.param
    use_instructions(monkeypatch, native, KINDS[kind])
    return kind


def run(name: str, batch: Batch) -> Tensor:
    """One layer by the named back end."""
    plan = make_attention_backend(name, batch.shape, batch.new_cache()).plan(batch.metadata)
    return plan.forward(batch.q, batch.k, batch.v, 0, batch.sinks)


def check(batch: Batch) -> None:
    """Against `torch` in float32 of the same numbers, in float32 and in bfloat16."""
    for dtype, limit in ((torch.float32, 3e-6), (torch.bfloat16, 1e-2)):
        own = batch.to(dtype)
        expected = run("torch", own.to(torch.float32))
        torch.testing.assert_close(run("native", own).float(), expected, atol=limit, rtol=limit)


CASES = {
    "one prompt": (AttentionShape(4, 2, 8), [(0, 5)], 4),
    "mixed": (AttentionShape(4, 2, 8), [(0, 70), (30, 9), (100, 1), (3, 130), (0, 0), (0, 1)], 4),
    "window": (AttentionShape(6, 2, 20, sliding_window=33), [(0, 200), (257, 90), (70, 3)], 16),
    "cap and sinks": (AttentionShape(5, 1, 80, soft_cap=1.5, sinks=True), [(10, 40), (0, 64), (1, 65)], 64),
    "large group": (AttentionShape(300, 1, 3), [(0, 40), (70, 2)], 1),
    "small windows": (AttentionShape(3, 3, 33, sliding_window=1), [(66, 70)], 16),
    "wide heads": (AttentionShape(7, 1, 160, scale=0.3), [(64, 64), (63, 66)], 16),
    "narrow values": (AttentionShape(4, 2, 80, sliding_window=65, sinks=True, v_head_dim=33), [(100, 90), (0, 70)], 16),
    "wide values": (AttentionShape(6, 2, 20, v_head_dim=160), [(64, 64), (3, 130), (70, 1)], 16),
    "eight": (AttentionShape(8, 1, 64), [(200, 100)], 16),
}


@pytest.mark.sample(8)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_instructions(case: str) -> None:
    shape, requests, block_size = CASES[case]
    check(make_batch(requests, shape=shape, block_size=block_size, padding=2))


@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 140), st.integers(0, 90)), min_size=1, max_size=5),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([3, 16, 64]),
    window=st.sampled_from([None, 1, 40, 64]),
    sinks=st.booleans(),
    block_size=st.sampled_from([1, 16, 64]),
    seed=st.integers(0, 99),
)
def test_any_batch(
    requests: list[tuple[int, int]],
    group: int,
    head_dim: int,
    window: int | None,
    sinks: bool,
    block_size: int,
    seed: int,
) -> None:
    requests = [(prefix if new else 0, new) for prefix, new in requests]
    shape = AttentionShape(2 * group, 2, head_dim, sliding_window=window, sinks=sinks)
    check(make_batch(requests, shape=shape, block_size=block_size, padding=seed % 3, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(8, 2, 64), (5, 1, 20)])
def test_bit_for_bit_the_same_alone_and_on_any_threads(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    batch = make_batch([(0, 150), (90, 70), (30, 1), (7, 3), (0, 64)], heads=heads, block_size=16).to(dtype)
    whole = run("native", batch)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            with ThreadPoolExecutor(1) as pool:  # this process is forked by other tests: threads end with the pool
                found = pool.submit(lambda t=threads: (torch.set_num_threads(t), run("native", batch))[1]).result()
            assert torch.equal(found, whole)
    finally:
        torch.set_num_threads(before)
    starts = batch.metadata.query_start_loc_cpu
    lanes = [UBatchSlice(slice(r, r + 1), slice(starts[r], starts[r + 1])) for r in range(len(starts) - 1)]
    for metadata, lane in zip(split_attn_metadata(lanes, batch.metadata), lanes, strict=True):
        rows = lane.token_slice
        own = replace(batch, metadata=metadata, q=batch.q[rows], k=batch.k[rows], v=batch.v[rows])
        assert torch.equal(run("native", own), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_for_bit_the_same_wherever_a_prompt_is_cut(dtype: torch.dtype) -> None:
    batch = make_batch([(20, 150)], heads=(8, 2, 64), block_size=16).to(dtype)
    whole = run("native", batch)
    cuts = [0, 37, 101, 150]
    lanes = [UBatchSlice(slice(0, 1), slice(start, stop)) for start, stop in pairwise(cuts)]
    backend = make_attention_backend("native", batch.shape, batch.new_cache())
    for metadata, lane in zip(split_attn_metadata(lanes, batch.metadata), lanes, strict=True):
        rows = lane.token_slice
        out = backend.plan(metadata).forward(batch.q[rows], batch.k[rows], batch.v[rows], 0)
        assert torch.equal(out, whole[rows])


def test_more_threads_than_when_it_was_planned() -> None:
    batch = make_batch([(0, 150), (90, 70)], heads=(8, 2, 16), block_size=16)
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as pool:

            def compute() -> Tensor:
                torch.set_num_threads(1)
                plan = make_attention_backend("native", batch.shape, batch.new_cache()).plan(batch.metadata)
                torch.set_num_threads(3)
                return plan.forward(batch.q, batch.k, batch.v, 0)

            assert torch.equal(pool.submit(compute).result(), run("native", batch))
    finally:
        torch.set_num_threads(before)
