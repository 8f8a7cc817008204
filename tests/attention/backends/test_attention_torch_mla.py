"""Latent attention by the `torch` and `native` back ends against the plain reference: absorbed, expanded, in chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_batches import MLABatch, fp8_scales, make_batch, make_mla_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import AttentionShape, KVCacheSpec, MLAKVCache, MLAShape, PagedKVCache, make_attention_backend
from attention.backends.torch import mla as torch_mla
from attention.backends.torch.mla import ExpandedGroup, TorchMLABackend, TorchMLAPlan
from ubatch import ConfigError
from ubatch.kernels.c_jit import why_not_c

MIXED = [(9, 4), (1, 2), (0, 4), (3, 1), (0, 7), (12, 1), (0, 0), (30, 5)]
BACKENDS = ["torch", *([] if why_not_c() else ["native"])]
DEEPSEEK = MLAShape(16, 512, 128, 64, 128)


def kinds(plan: TorchMLAPlan) -> tuple[int, int]:
    """Groups that attend to latents, and those that attend to expanded keys and values."""
    expanded = sum(isinstance(group, ExpandedGroup) for group in plan.groups)
    return len(plan.groups) - expanded, expanded


def check(batch: MLABatch, num_absorbed: int | None = None, num_expanded: int | None = None) -> None:
    """Output and cache equal the reference's; optionally in so many groups of each kind."""
    slow = batch.new_cache()
    expected = [batch.expected(layer, slow) for layer in range(batch.spec.num_layers)]
    for name in BACKENDS[: 1 if batch.spec.fp8 else None]:
        fast = batch.new_cache()
        plan = make_attention_backend(name, batch.shape, fast).plan(batch.metadata)
        for layer, right in enumerate(expected):
            out = plan.forward(batch.inputs, layer)
            torch.testing.assert_close(out, right, atol=5e-6, rtol=1e-5)
            assert out.shape == (len(batch.inputs.latent), batch.shape.num_heads, batch.shape.v_head_dim)
            assert out.is_contiguous()
            assert torch.equal(fast.rows(layer), slow.rows(layer))
    if num_absorbed is not None:
        plan = make_attention_backend("torch", batch.shape, batch.new_cache()).plan(batch.metadata)
        assert isinstance(plan, TorchMLAPlan)
        assert kinds(plan) == (num_absorbed, num_expanded)


@pytest.mark.parametrize(
    ("requests", "num_absorbed", "num_expanded"),
    [
        ([(5, 1), (9, 1), (2, 1), (18, 1)], 1, 0),  # decode
        ([(0, 6)] * 4, 0, 1),  # prompts
        ([(0, 5), (0, 9), (0, 2)], 0, 1),
        ([(7, 5), (20, 4)], 0, 1),  # chunked prefill
        ([(20, 2), (20, 2)], 1, 0),  # few queries, long prefix
        (MIXED, 1, 2),
        ([(0, 200), (0, 3)], 0, 2),
    ],
)
def test_equals_the_reference_in_few_groups(
    requests: list[tuple[int, int]], num_absorbed: int, num_expanded: int
) -> None:
    check(make_mla_batch(requests, num_layers=2), num_absorbed, num_expanded)


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 7)), max_size=7),
    block_size=st.sampled_from([1, 4, 16]),
    fp8=st.booleans(),
    interleaved=st.booleans(),
    padding=st.integers(0, 3),
    chunk=st.sampled_from([1, 8, 4096]),
    seed=st.integers(0, 99),
)
def test_any_batch(
    requests: list[tuple[int, int]],
    block_size: int,
    fp8: bool,
    interleaved: bool,
    padding: int,
    chunk: int,
    seed: int,
) -> None:
    requests = [(prefix if new else 0, new) for prefix, new in requests]
    batch = make_mla_batch(
        requests, block_size=block_size, fp8=fp8, interleaved=interleaved, padding=padding, seed=seed
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_mla, "_CHUNK_TOKENS", chunk)
        check(batch)


@pytest.mark.parametrize("block_size", [1, 16, 64, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_page_sizes(block_size: int, fp8: bool) -> None:
    check(make_mla_batch([(130, 1), (63, 5), (0, 66), (127, 1), (64, 4)], block_size=block_size, fp8=fp8, padding=1))


@pytest.mark.parametrize(
    "shape",
    [
        MLAShape(3, 16, 2, 4, 3, scale=0.8),
        MLAShape(2, 16, 3, 2, 8),  # values wider than keys
        MLAShape(2, 4, 8, 4, 8),  # latents so small that absorbing always pays
        MLAShape(1, 16, 8, 4, 12),
    ],
)
def test_shapes(shape: MLAShape) -> None:
    check(make_mla_batch(MIXED, shape=shape, num_layers=2, padding=2))


# -- drafts ------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    prefixes=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    number=st.integers(1, 6),
    drafts=st.sampled_from(["chain", "tree"]),
    fp8=st.booleans(),
    padding_requests=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_verify(prefixes: list[int], number: int, drafts: str, fp8: bool, padding_requests: int, seed: int) -> None:
    requests = [*((prefix, number) for prefix in prefixes), *[(0, 0)] * padding_requests]
    batch = make_mla_batch(requests, drafts=drafts, fp8=fp8, padding=padding_requests, seed=seed)
    check(batch, *((None, None) if drafts == "chain" else (1, 0)))


def test_a_draft_that_sees_nothing_gives_zeros() -> None:
    batch = make_mla_batch([(9, 4), (0, 4)], drafts="tree")
    verify = batch.metadata.spec_verify
    assert verify is not None
    assert verify.custom_mask is not None
    mask = verify.custom_mask.clone()
    mask[3 * 13 : 4 * 13] = False
    batch = replace(batch, metadata=replace(batch.metadata, spec_verify=replace(verify, custom_mask=mask)))
    check(batch)
    assert not TorchMLABackend(batch.shape, batch.new_cache()).plan(batch.metadata).forward(batch.inputs, 0)[3].any()


# -- which way ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "absorbed"),
    [
        ([(1000, 1)], True),  # decode
        ([(1000, 8)], True),  # verify
        ([(4000, 160)], True),
        ([(4000, 200)], False),
        ([(0, 1)], False),
        ([(0, 2000)], False),  # prefill
        ([(64, 512)], False),
    ],
)
def test_deepseek_takes_the_way_that_multiplies_less(requests: list[tuple[int, int]], absorbed: bool) -> None:
    """Counted here term by term, for one head."""
    ((prefix, new),) = requests
    shape = DEEPSEEK
    pairs = sum(prefix + i + 1 for i in range(new))
    into_latents = new * shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
    cost_absorbed = into_latents + pairs * (2 * shape.kv_lora_rank + shape.qk_rope_head_dim)
    expanding = (prefix + new) * shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
    cost_expanded = expanding + pairs * (shape.qk_head_dim + shape.v_head_dim)
    assert (cost_absorbed < cost_expanded) == absorbed
    metadata = make_batch(requests, heads=(1, 1, 1), block_size=64).metadata
    cache = MLAKVCache(shape.cache_spec(1, 64, torch.float32), 1)  # only the plan is looked at
    plan = TorchMLABackend(shape, cache).plan(metadata)
    assert kinds(plan) == ((1, 0) if absorbed else (0, 1))


def test_both_ways_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_mla_batch([(20, 6), (9, 3), (40, 1)])
    outs = []
    for absorbs in (True, False):
        monkeypatch.setattr(torch_mla.LatentStep, "absorbs", lambda step, request, absorbs=absorbs: absorbs)
        plan = TorchMLABackend(batch.shape, batch.new_cache()).plan(batch.metadata)
        assert bool(kinds(plan)[0]) == absorbs
        outs.append(plan.forward(batch.inputs, 0))
    torch.testing.assert_close(outs[0], outs[1], atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(outs[0], batch.expected(), atol=5e-6, rtol=1e-5)


def test_an_empty_chunk_of_one_request_beside_a_full_one_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_mla, "_CHUNK_TOKENS", 16)
    check(make_mla_batch([(30, 5), (2, 5), (25, 5)]), 0, 1)


def test_memory_is_bounded_by_the_chunk_not_by_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_mla, "_CHUNK_TOKENS", 32)
    held = set()
    for prefix in (64, 256, 512):
        batch = make_mla_batch([(prefix, 4), (prefix, 4)])
        backend = TorchMLABackend(batch.shape, batch.new_cache())
        assert backend.nbytes == 0
        out = backend.plan(batch.metadata).forward(batch.inputs, 0)
        torch.testing.assert_close(out, batch.expected(), atol=5e-6, rtol=1e-5)
        held.add(backend.nbytes)
    assert held == {1024 * 4}  # 32 rows of 20 numbers, rounded up to a power of two


# -- fp8 and refusals --------------------------------------------------------------------------------------------------


def test_fp8_is_read_with_its_scale_and_new_tokens_as_they_were_stored() -> None:
    """A prompt prefilled at once equals the same prompt in two chunks: both read what the cache keeps."""
    requests = [(0, 12), (40, 1)]
    batch, exact = make_mla_batch(requests, fp8=True), make_mla_batch(requests)
    assert fp8_scales(0)[0] != 1.0
    out = TorchMLABackend(batch.shape, batch.new_cache()).plan(batch.metadata).forward(batch.inputs, 0)
    torch.testing.assert_close(out, batch.expected(), atol=5e-6, rtol=1e-5)
    assert (out - exact.expected()).abs().max() < 0.3
    assert (out - exact.expected()).abs().mean() > 1e-3  # it is quantised


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_half_precision_is_close_to_the_reference_in_single(dtype: torch.dtype, fp8: bool) -> None:
    batch = make_mla_batch(MIXED, fp8=fp8).to(dtype)
    out = TorchMLABackend(batch.shape, batch.new_cache()).plan(batch.metadata).forward(batch.inputs, 0)
    assert out.dtype == dtype
    # Numbers divided by an fp8 scale round otherwise in half precision, so there the oracle has to compute in it, too.
    expected = batch.expected().float() if fp8 else batch.to(torch.float32).expected()
    assert (out.float() - expected).abs().max() < 0.02 * expected.abs().max()


def test_the_name_torch_serves_both_kinds_and_neither_takes_the_other() -> None:
    batch = make_mla_batch([(3, 1)])
    assert isinstance(make_attention_backend("torch", batch.shape, batch.new_cache()), TorchMLABackend)
    cache = PagedKVCache(KVCacheSpec(1, 2, 8), 2)
    with pytest.raises(ConfigError, match="only multi-head latent attention"):
        make_attention_backend("torch_mla", AttentionShape(4, 2, 8), cache)
    with pytest.raises(ConfigError, match="needs a cache"):
        make_attention_backend("torch", batch.shape, cache)


def test_capture_is_refused_by_name() -> None:
    batch = make_mla_batch([(3, 1)])
    with pytest.raises(ConfigError, match="'torch_mla' cannot run in a CUDA graph"):
        TorchMLABackend(batch.shape, batch.new_cache()).plan_for_graph(batch.metadata)
