"""The `torch` back end against the plain reference: every kind of batch, every grouping, every option."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_batches import Batch, fp8_scales, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import (
    AttentionShape,
    KVCacheSpec,
    PagedKVCache,
    attention_backends,
    make_attention_backend,
    register_attention_backend,
)
from attention import lse as attention_lse
from attention.backends.torch import groups as torch_groups
from attention.backends.torch.sdpa import TorchAttentionBackend, TorchAttentionPlan
from attention.lse import merge_states, softmax_attention
from ubatch import ConfigError, ForwardMode

pytestmark = pytest.mark.long

MIXED = [(9, 4), (1, 2), (0, 4), (3, 1), (0, 7), (12, 1), (0, 0)]

SHAPES = {
    "gqa": AttentionShape(4, 2, 8),
    "mha": AttentionShape(4, 4, 8),
    "mqa": AttentionShape(6, 1, 16),
}
OPTIONS = {
    "scale": AttentionShape(4, 2, 8, scale=0.9),
    "window": AttentionShape(4, 2, 8, sliding_window=5),
    "window-of-one": AttentionShape(4, 2, 8, sliding_window=1),
    "soft-cap": AttentionShape(4, 2, 8, soft_cap=0.7),
    "sinks": AttentionShape(8, 2, 8, sinks=True),
    "narrow-values": AttentionShape(4, 2, 8, v_head_dim=6),
    "wide-values": AttentionShape(8, 2, 8, sliding_window=5, sinks=True, v_head_dim=12),
    "all": AttentionShape(8, 2, 8, scale=0.5, sliding_window=6, soft_cap=2.0, sinks=True),
}


def check(batch: Batch, num_calls: int | None = None) -> None:
    """Output and cache equal the reference's; optionally in so many attention calls."""
    fast, slow = batch.new_cache(), batch.new_cache()
    plan = make_attention_backend("torch", batch.shape, fast).plan(batch.metadata)
    for layer in range(batch.spec.num_layers):
        out = plan.forward(batch.q, batch.k, batch.v, layer, batch.sinks)
        torch.testing.assert_close(out, batch.expected(layer, slow), atol=2e-6, rtol=1e-5)
        assert out.is_contiguous()
        assert torch.equal(fast.keys(layer), slow.keys(layer))
        assert torch.equal(fast.values(layer), slow.values(layer))
    if num_calls is not None:
        assert isinstance(plan, TorchAttentionPlan)
        assert len(plan.groups) == num_calls


@pytest.mark.sample(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("requests", "num_calls"),
    [
        ([(0, 6)] * 4, 1),  # a batch of prompts
        ([(0, 1)] * 3, 1),
        ([(0, 5), (0, 9), (0, 2)], 1),  # ragged prompts, padded
        ([(5, 1), (9, 1), (2, 1), (18, 1)], 1),  # decode
        ([(7, 1), (7, 1)], 1),  # decode, whole blocks: no mask
        ([(4, 3), (4, 3)], 1),  # verify
        (MIXED, 3),  # fresh, decode, extend
        ([(0, 200), (0, 3)], 2),  # too ragged to pad
        ([(500, 1), (2, 1), (3, 1)], 2),
    ],
)
def test_equals_the_reference_in_few_calls(shape: str, requests: list[tuple[int, int]], num_calls: int) -> None:
    check(make_batch(requests, shape=SHAPES[shape], num_layers=2), num_calls)


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 7)), max_size=8),
    option=st.sampled_from(["gqa", *OPTIONS]),
    block_size=st.sampled_from([1, 4, 16]),
    fp8=st.booleans(),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_batch_with_any_option(
    requests: list[tuple[int, int]], option: str, block_size: int, fp8: bool, padding: int, seed: int
) -> None:
    requests = [(prefix if new else 0, new) for prefix, new in requests]
    shape = (SHAPES | OPTIONS)[option]
    check(make_batch(requests, shape=shape, block_size=block_size, fp8=fp8, padding=padding, seed=seed))


@pytest.mark.sample(5)
@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "narrow-values"])  # only a size
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_every_option_in_a_mixed_batch_and_none_is_ignored(option: str, fp8: bool) -> None:
    batch = make_batch(MIXED, shape=OPTIONS[option], fp8=fp8, num_layers=2, padding=2)
    check(batch)
    shape = batch.shape
    plain = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, v_head_dim=shape.v_head_dim)
    without = replace(batch, shape=plain, sinks=None).expected()
    assert (batch.expected() - without).abs().max() > 1e-2  # the batch would notice


@pytest.mark.sample(3)
@pytest.mark.parametrize("block_size", [1, 16, 64, 128])
@pytest.mark.parametrize("heads", [(2, 2, 8), (4, 1, 8)], ids=["group-1", "group-4"])
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_page_sizes(block_size: int, heads: tuple[int, int, int], fp8: bool) -> None:
    requests = [(130, 1), (63, 2), (0, 66), (127, 1), (64, 1), (15, 3)]
    check(make_batch(requests, heads=heads, block_size=block_size, fp8=fp8, padding=1))


@pytest.mark.parametrize("window", [1, 16, 17, 40, 200])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_windows_that_begin_anywhere_in_a_block(window: int, block_size: int) -> None:
    shape = AttentionShape(2, 1, 8, sliding_window=window)
    check(make_batch([(95, 1), (79, 1), (64, 3), (0, 30), (5, 1)], shape=shape, block_size=block_size))


def test_a_window_gathers_only_the_blocks_it_touches() -> None:
    batch = make_batch([(1000, 1), (900, 1)], shape=AttentionShape(2, 1, 8, sliding_window=32), block_size=16)
    cache = batch.new_cache()
    backend = TorchAttentionBackend(batch.shape, cache)
    backend.plan(batch.metadata).forward(batch.q, batch.k, batch.v, 0)
    assert backend.nbytes <= 2 * 2 * (3 * 16) * 8 * 4 * 2  # 3 blocks of each request, rounded up to a power of two


# -- drafts ------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    prefixes=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    number=st.integers(1, 6),
    option=st.sampled_from(["gqa", *OPTIONS]),
    drafts=st.sampled_from(["chain", "tree"]),
    block_size=st.sampled_from([1, 16]),
    fp8=st.booleans(),
    padding_requests=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_verify(
    prefixes: list[int],
    number: int,
    option: str,
    drafts: str,
    block_size: int,
    fp8: bool,
    padding_requests: int,
    seed: int,
) -> None:
    requests = [*((prefix, number) for prefix in prefixes), *[(0, 0)] * padding_requests]
    shape = (SHAPES | OPTIONS)[option]
    check(
        make_batch(
            requests, shape=shape, drafts=drafts, block_size=block_size, fp8=fp8, padding=padding_requests, seed=seed
        )
    )


def test_any_mask_is_obeyed_also_a_row_that_sees_nothing() -> None:
    batch = make_batch([(9, 4), (0, 4), (20, 4)], drafts="tree")
    verify = batch.metadata.spec_verify
    assert verify is not None
    assert verify.custom_mask is not None
    mask = torch.rand(verify.custom_mask.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[: 2 * 13] = False  # the first request's first two drafts
    batch = replace(batch, metadata=replace(batch.metadata, spec_verify=replace(verify, custom_mask=mask)))
    check(batch)
    out = TorchAttentionBackend(batch.shape, batch.new_cache()).plan(batch.metadata)
    assert not out.forward(batch.q, batch.k, batch.v, 0)[:2].any()


def test_a_chain_equals_a_tree_without_branches() -> None:
    chain = make_batch([(9, 3), (4, 3)], drafts="chain")
    causal = make_batch([(9, 3), (4, 3)], mode=ForwardMode.PREFILL)
    assert torch.equal(chain.expected(), causal.expected())


# -- fp8 ---------------------------------------------------------------------------------------------------------------


def test_fp8_is_read_with_both_scales() -> None:
    """Against the unquantised batch: a scale that is forgotten is off by a factor of ten."""
    batch = make_batch([(40, 1), (0, 9), (11, 3)], fp8=True)
    exact = make_batch([(40, 1), (0, 9), (11, 3)])
    assert fp8_scales(0) != (1.0, 1.0)
    plan = TorchAttentionBackend(batch.shape, batch.new_cache()).plan(batch.metadata)
    out = plan.forward(batch.q, batch.k, batch.v, 0)
    assert (out - exact.expected()).abs().max() < 0.2
    assert (out - exact.expected()).abs().mean() > 1e-3  # it is quantised


@pytest.mark.parametrize("option", ["gqa", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_half_precision_is_close_to_the_reference_in_single(option: str, dtype: torch.dtype, fp8: bool) -> None:
    batch = make_batch(MIXED, shape=(SHAPES | OPTIONS)[option], fp8=fp8).to(dtype)
    plan = TorchAttentionBackend(batch.shape, batch.new_cache()).plan(batch.metadata)
    out = plan.forward(batch.q, batch.k, batch.v, 0, batch.sinks)
    assert out.dtype == dtype
    # Numbers divided by an fp8 scale round otherwise in half precision, so there the oracle has to compute in it, too.
    expected = batch.expected().float() if fp8 else batch.to(torch.float32).expected()
    torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=3e-2)


# -- memory and state --------------------------------------------------------------------------------------------------


def test_gathers_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small limit on gathered bytes gives more calls and the same result."""
    requests = [(11, 1), (14, 1), (9, 1), (12, 1), (13, 1), (10, 1)]
    monkeypatch.setattr(torch_groups, "_GATHER_BYTES", 32 * 2 * 8 * 4)
    check(make_batch(requests), num_calls=3)
    monkeypatch.setattr(torch_groups, "_GATHER_BYTES", 1)
    check(make_batch(requests), num_calls=6)


def test_the_workspace_is_the_back_ends_and_grows_only_when_needed() -> None:
    small, large = make_batch([(9, 1)], seed=1), make_batch([(70, 1), (64, 1)], seed=2)
    backends = [TorchAttentionBackend(batch.shape, batch.new_cache()) for batch in (small, large)]
    assert [backend.nbytes for backend in backends] == [0, 0]  # making one allocates nothing
    cache = large.new_cache()
    backend = TorchAttentionBackend(large.shape, cache)
    with torch.inference_mode():
        first = backend.plan(small.metadata)
        held = backend.nbytes
        assert held >= 2 * 12 * 2 * 8 * 4
        plan = backend.plan(large.metadata)
        assert backend.nbytes > held
        plan.forward(large.q, large.k, large.v, 0)
    held = backend.nbytes
    workspace = backend._workspace.take(1).data_ptr()
    out = backend.plan(large.metadata).forward(large.q, large.k, large.v, 0)  # outside of inference mode, too
    torch.testing.assert_close(out, large.expected(), atol=2e-6, rtol=1e-5)
    assert (backend.nbytes, backend._workspace.take(1).data_ptr()) == (held, workspace)
    assert len(first.groups) == 1


def test_the_workspace_is_zeroed_when_made() -> None:
    batch = make_batch([(70, 1), (64, 1)])
    backend = TorchAttentionBackend(batch.shape, batch.new_cache())
    backend.plan(batch.metadata)
    assert not backend._workspace.take(backend.nbytes // 4).any()


def test_two_plans_do_not_share_state() -> None:
    """Two lanes plan first and run interleaved, layer by layer."""
    first, second = make_batch([(9, 1), (6, 1)], num_layers=2), make_batch([(3, 2), (0, 4)], num_layers=2, seed=1)
    caches = [first.new_cache(), second.new_cache()]
    plans = [
        make_attention_backend("torch", batch.shape, cache).plan(batch.metadata)
        for batch, cache in zip((first, second), caches, strict=True)
    ]
    for layer in range(2):
        for plan, batch in zip(plans, (first, second), strict=True):
            out = plan.forward(batch.q, batch.k, batch.v, layer)
            torch.testing.assert_close(out, batch.expected(layer), atol=2e-6, rtol=1e-5)


def test_two_plans_of_one_back_end_may_alternate() -> None:
    """The second plan grew the workspace after the first was made."""
    batch = make_batch([(70, 1), (3, 1)], num_layers=2)
    backend = TorchAttentionBackend(batch.shape, batch.new_cache())
    lanes = [make_batch([(5, 1)]), batch]
    plans = [backend.plan(lane.metadata) for lane in lanes]
    plans[0].forward(lanes[0].q, lanes[0].k, lanes[0].v, 1)
    out = plans[1].forward(batch.q, batch.k, batch.v, 0)
    torch.testing.assert_close(out, batch.expected(), atol=2e-6, rtol=1e-5)


# -- the oracle, and attention in parts --------------------------------------------------------------------------------


def dense(batch: Batch, shape: AttentionShape, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of one fresh prompt by explicit matrices, one per head, without any paging."""
    length = len(batch.q)
    scores = torch.einsum("qhd,khd->hqk", batch.q, batch.k.repeat_interleave(shape.group_size, 1)) * shape.softmax_scale
    if shape.soft_cap is not None:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores[:, (distance < 0) | (distance >= (shape.sliding_window or length))] = -torch.inf
    extra = torch.zeros(shape.num_heads) - torch.inf if sinks is None else sinks
    weights = torch.cat((scores, extra[:, None, None].expand(-1, length, 1)), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, batch.v.repeat_interleave(shape.group_size, 1))


@pytest.mark.parametrize("option", ["gqa", *OPTIONS])
def test_the_reference_equals_dense_attention(option: str) -> None:
    batch = make_batch([(0, 12)], shape=(SHAPES | OPTIONS)[option])
    torch.testing.assert_close(batch.expected(), dense(batch, batch.shape, batch.sinks), atol=2e-6, rtol=1e-5)


def test_the_reference_follows_a_tree() -> None:
    """Each draft's result is what it had alone at the end of its own branch."""
    batch = make_batch([(6, 5)], drafts="tree", seed=3)
    verify = batch.metadata.spec_verify
    assert verify is not None
    mask = verify.mask_of(0)
    assert mask is not None
    out = batch.expected()
    for draft in range(5):
        branch = mask[draft, 6:].nonzero().flatten()
        alone = make_batch([(6, len(branch))], seed=3)
        alone = replace(
            alone, q=batch.q[branch], k=batch.k[branch], v=batch.v[branch], past_k=batch.past_k, past_v=batch.past_v
        )
        torch.testing.assert_close(alone.expected()[-1], out[draft], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -2.0, 1.0, 0.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("score_bytes", [1, 64 << 20], ids=["row-by-row", "at-once"])
def test_parts_merge_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, sinks: torch.Tensor | None, score_bytes: int
) -> None:
    """Keys cut in three, one part empty, scores so large that exponents overflow unless they are shifted."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 3, 8, generator=generator) * 30
    k, v = torch.randn(2, 2, 2, 10, 8, generator=generator)
    mask = torch.zeros(2, 1, 3, 10)
    mask[0, :, :, 4:7] = -torch.inf  # one request's second part is empty
    whole, whole_lse = softmax_attention(q, k, v, scale=1.0, mask=mask, sinks=sinks)
    monkeypatch.setattr(attention_lse, "_SCORE_BYTES", score_bytes)
    state = None
    for start, stop in ((0, 4), (4, 7), (7, 10)):
        keys, values, hidden = k[:, :, start:stop], v[:, :, start:stop], mask[..., start:stop]
        part = softmax_attention(q, keys, values, scale=1.0, mask=hidden, sinks=sinks if start == 0 else None)
        state = part if state is None else merge_states(*state, *part)
    assert state is not None
    torch.testing.assert_close(state[0], whole, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(state[1], whole_lse, atol=2e-6, rtol=1e-5)


def test_an_empty_state_weighs_nothing_whatever_it_holds() -> None:
    out, lse = torch.ones(3, 2, 4), torch.tensor([[0.0, 1.0], [-torch.inf, 2.0], [-torch.inf, -torch.inf]])
    other = torch.full((3, 2, 4), torch.nan)
    merged, merged_lse = merge_states(out, lse, other, torch.full((3, 2), -torch.inf))
    assert torch.equal(merged_lse, lse)
    assert torch.equal(merged, torch.where(lse.isneginf()[..., None], 0.0, out))
    swapped, _ = merge_states(other, torch.full((3, 2), -torch.inf), out, lse)
    assert torch.equal(swapped, merged)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [False, True])
def test_sinks_that_the_shape_does_not_expect_are_refused(sinks: bool) -> None:
    batch = make_batch([(3, 1)], shape=AttentionShape(4, 2, 8, sinks=sinks))
    plan = TorchAttentionBackend(batch.shape, batch.new_cache()).plan(batch.metadata)
    with pytest.raises(ConfigError, match=f"AttentionShape.sinks is {sinks}"):
        plan.forward(batch.q, batch.k, batch.v, 0, None if sinks else torch.zeros(4))


def test_registry() -> None:
    cache = PagedKVCache(KVCacheSpec(1, 2, 8), 2)
    assert "torch" in attention_backends()
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        make_attention_backend("toch", AttentionShape(4, 2, 8), cache)
    with pytest.raises(ConfigError, match="needs a cache"):
        make_attention_backend("torch", AttentionShape(4, 4, 8), cache)
    with pytest.raises(ConfigError, match="already"):
        register_attention_backend("torch", "somewhere:Else")
    with pytest.raises(ConfigError, match="form"):
        register_attention_backend("mine", "somewhere.Else")
    register_attention_backend("torch", "attention.backends.torch.sdpa:TorchAttentionBackend")


def test_capture_is_refused_by_name() -> None:
    batch = make_batch([(3, 1)])
    backend = TorchAttentionBackend(batch.shape, batch.new_cache())
    with pytest.raises(ConfigError, match="'torch' cannot run in a CUDA graph"):
        backend.plan_for_graph(batch.metadata)


def test_shapes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="share"):
        AttentionShape(5, 2, 8)
    with pytest.raises(ConfigError, match="num_heads"):
        AttentionShape(0, 2, 8)
    with pytest.raises(ConfigError, match="sliding_window"):
        AttentionShape(4, 2, 8, sliding_window=0)
    with pytest.raises(ConfigError, match="soft_cap"):
        AttentionShape(4, 2, 8, soft_cap=-1.0)
