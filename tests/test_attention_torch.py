"""The `torch` back end against the plain reference: every kind of batch, every grouping."""

from __future__ import annotations

import pytest
import torch
from attention_batches import Batch, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import (
    AttentionShape,
    KVCacheSpec,
    PagedKVCache,
    attention_backends,
    make_attention_backend,
    reference_attention,
    register_attention_backend,
)
from attention.backends import torch_sdpa
from attention.backends.torch_sdpa import TorchAttentionPlan
from ubatch import ConfigError


def check(batch: Batch, num_calls: int | None = None) -> None:
    """Output and cache equal the reference's; optionally in so many attention calls."""
    fast, slow = batch.new_cache(), batch.new_cache()
    plan = make_attention_backend("torch", batch.shape, fast).plan(batch.metadata)
    for layer in range(batch.spec.num_layers):
        out = plan.forward(batch.q, batch.k, batch.v, layer)
        expected = reference_attention(
            batch.q, batch.k, batch.v, layer, batch.metadata, slow, batch.shape.softmax_scale
        )
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
        assert out.is_contiguous()
        assert torch.equal(fast.keys(layer), slow.keys(layer))
        assert torch.equal(fast.values(layer), slow.values(layer))
    if num_calls is not None:
        assert isinstance(plan, TorchAttentionPlan)
        assert plan.num_calls == num_calls


@pytest.mark.parametrize("heads", [(4, 2, 8), (4, 4, 8), (6, 1, 16)], ids=["gqa", "mha", "mqa"])
@pytest.mark.parametrize(
    ("requests", "num_calls"),
    [
        ([(0, 6)] * 4, 1),  # a batch of prompts
        ([(0, 1)] * 3, 1),
        ([(0, 5), (0, 9), (0, 2)], 1),  # ragged prompts, padded
        ([(5, 1), (9, 1), (2, 1), (18, 1)], 1),  # decode
        ([(7, 1), (7, 1)], 1),  # decode, whole blocks: no mask
        ([(4, 3), (4, 3)], 1),  # verify
        ([(9, 4), (1, 2), (0, 7), (3, 1), (0, 7), (12, 1)], 3),  # mixed: fresh, decode, extend
        ([(0, 200), (0, 3)], 2),  # too ragged to pad
        ([(500, 1), (2, 1), (3, 1)], 2),
    ],
)
def test_against_reference(heads: tuple[int, int, int], requests: list[tuple[int, int]], num_calls: int) -> None:
    if sum(prefix + new for prefix, new in requests) > 100 and heads[0] != heads[1]:
        heads = (2, 1, 8)  # the reference is slow
    check(make_batch(requests, heads=heads, num_layers=2), num_calls)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 7)), max_size=8),
    block_size=st.sampled_from([1, 4, 16]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_batch(requests: list[tuple[int, int]], block_size: int, padding: int, seed: int) -> None:
    requests = [(prefix if new else 0, new) for prefix, new in requests]
    check(make_batch(requests, block_size=block_size, padding=padding, seed=seed))


def test_gathers_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small limit on gathered bytes gives more calls and the same result."""
    requests = [(11, 1), (14, 1), (9, 1), (12, 1), (13, 1), (10, 1)]
    monkeypatch.setattr(torch_sdpa, "_GATHER_BYTES", 32 * 2 * 8 * 4)
    check(make_batch(requests), num_calls=3)
    monkeypatch.setattr(torch_sdpa, "_GATHER_BYTES", 1)
    check(make_batch(requests), num_calls=6)


def test_two_plans_do_not_share_state() -> None:
    """Two lanes plan first and run interleaved, layer by layer."""
    first, second = make_batch([(9, 1), (6, 1)], num_layers=2), make_batch([(3, 2), (0, 4)], num_layers=2, seed=1)
    caches = [first.new_cache(), second.new_cache()]
    plans = [
        make_attention_backend("torch", batch.shape, cache).plan(batch.metadata)
        for batch, cache in zip((first, second), caches, strict=True)
    ]
    for layer in range(2):
        outs = [
            plan.forward(batch.q, batch.k, batch.v, layer) for plan, batch in zip(plans, (first, second), strict=True)
        ]
        for out, batch in zip(outs, (first, second), strict=True):
            expected = reference_attention(
                batch.q, batch.k, batch.v, layer, batch.metadata, batch.new_cache(), batch.shape.softmax_scale
            )
            torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_reference_against_dense_attention() -> None:
    """The oracle itself, against one call of torch's attention without any paging."""
    batch = make_batch([(0, 12)], heads=(4, 4, 8))
    out = reference_attention(batch.q, batch.k, batch.v, 0, batch.metadata, batch.new_cache(), 0.3)
    dense = torch.nn.functional.scaled_dot_product_attention(
        batch.q.transpose(0, 1), batch.k.transpose(0, 1), batch.v.transpose(0, 1), is_causal=True, scale=0.3
    )
    torch.testing.assert_close(out, dense.transpose(0, 1), atol=2e-6, rtol=1e-5)


def test_custom_scale_is_honoured() -> None:
    batch = make_batch([(5, 3), (0, 4), (2, 1)])
    shape = AttentionShape(4, 2, 8, scale=0.9)
    cache = batch.new_cache()
    out = make_attention_backend("torch", shape, cache).plan(batch.metadata).forward(batch.q, batch.k, batch.v, 0)
    expected = reference_attention(batch.q, batch.k, batch.v, 0, batch.metadata, batch.new_cache(), 0.9)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_registry() -> None:
    cache = PagedKVCache(KVCacheSpec(1, 2, 8), 2)
    assert "torch" in attention_backends()
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        make_attention_backend("toch", AttentionShape(4, 2, 8), cache)
    with pytest.raises(ConfigError, match="KV cache"):
        make_attention_backend("torch", AttentionShape(4, 4, 8), cache)
    with pytest.raises(ConfigError, match="already"):
        register_attention_backend("torch", "somewhere:Else")
    with pytest.raises(ConfigError, match="form"):
        register_attention_backend("mine", "somewhere.Else")
    register_attention_backend("torch", "attention.backends.torch_sdpa:TorchAttentionBackend")


def test_shapes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="share"):
        AttentionShape(5, 2, 8)
    with pytest.raises(ConfigError, match="num_heads"):
        AttentionShape(0, 2, 8)
