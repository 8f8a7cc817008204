"""The `native` back end: decodes in C against the oracle and `torch`, and to the last bit against itself."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batches import Batch, make_batch
from c_kernels import needs_c, use_instructions
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_threads import on_threads

from attention import AttentionShape, UBatchAttention, make_attention_backend, split_attn_metadata
from attention.backends.native import mha as native
from attention.backends.native.mha import NativeAttentionBackend
from attention.backends.native.requests import CHUNK_KEYS
from attention.kv_cache import KVCacheError
from ubatch import ConfigError, split_fixed

pytestmark = [needs_c, pytest.mark.long]

LONG = 2 * CHUNK_KEYS + 45


def run(name: str, batch: Batch) -> Tensor:
    """One layer by the named back end."""
    plan = make_attention_backend(name, batch.shape, batch.new_cache()).plan(batch.metadata)
    return plan.forward(batch.q, batch.k, batch.v, 0, batch.sinks)


def check(batch: Batch) -> Tensor:
    """Against the oracle, what is written included."""
    fast, slow = batch.new_cache(), batch.new_cache()
    plan = make_attention_backend("native", batch.shape, fast).plan(batch.metadata)
    for layer in range(batch.spec.num_layers):
        out = plan.forward(batch.q, batch.k, batch.v, layer, batch.sinks)
        torch.testing.assert_close(out, batch.expected(layer, slow), atol=5e-6, rtol=1e-5)
        assert torch.equal(fast.keys(layer), slow.keys(layer))
        assert torch.equal(fast.values(layer), slow.values(layer))
        assert out.is_contiguous()
    return out


def one_of(batch: Batch, index: int) -> Batch:
    """A decode batch's request, alone over the same cache."""
    part = split_attn_metadata(split_fixed(len(batch.q), num_ubatches=len(batch.q)), batch.metadata)[index]
    row = slice(index, index + 1)
    return replace(batch, metadata=part, q=batch.q[row], k=batch.k[row], v=batch.v[row])


@pytest.fixture(params=[16, 8])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Numbers a vector: AVX-512's, and everybody else's."""
    use_instructions(monkeypatch, native, {"LANES": request.param})
    return request.param


# -- right -------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("head_dim", [3, 16, 64, 80, 128])
def test_every_group_and_head_size(group: int, head_dim: int) -> None:
    requests = [(40, 1), (0, 1), (15, 1), (16, 1), (129, 1)]
    check(make_batch(requests, heads=(2 * group, 2, head_dim), block_size=16))


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 0, 5])), max_size=8),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 16, 20, 64]),
    value_dim=st.sampled_from([None, None, 6, 16, 80]),
    window=st.sampled_from([None, None, 1, 7, 33]),
    scale=st.sampled_from([None, 0.4]),
    soft_cap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    block_size=st.sampled_from([1, 16, 64]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@example([(LONG, 1), (3, 1), (0, 5)], 5, 2, 64, 80, None, None, None, False, 16, 1, 0)
@example([(LONG, 1), (LONG - 45, 1)], 4, 1, 20, None, None, None, 1.5, True, 64, 0, 0)
def test_any_batch(
    requests: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None,
    window: int | None,
    scale: float | None,
    soft_cap: float | None,
    sinks: bool,
    block_size: int,
    padding: int,
    seed: int,
) -> None:
    """Decodes and others, mixed, padded, with every option."""
    requests = [(prefix if new else 0, new) for prefix, new in requests]
    shape = AttentionShape(group * kv_heads, kv_heads, head_dim, scale, window, soft_cap, sinks, value_dim)
    check(make_batch(requests, shape=shape, block_size=block_size, padding=padding, seed=seed))


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("window", [None, 1, 17, CHUNK_KEYS, CHUNK_KEYS + 1, LONG])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("heads", [(4, 1, 16), (70, 2, 8)], ids=["few", "many"])
def test_long_contexts_in_chunks(window: int | None, sinks: bool, heads: tuple[int, int, int]) -> None:
    shape = AttentionShape(*heads, sliding_window=window, sinks=sinks)
    lengths = (CHUNK_KEYS - 1, CHUNK_KEYS, CHUNK_KEYS + 1, LONG)
    batch = make_batch([(length - 1, 1) for length in lengths], shape=shape, block_size=16)
    torch.testing.assert_close(run("native", batch), run("torch", batch), atol=2e-6, rtol=1e-5)


@pytest.mark.sample(3)
@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("heads", [(8, 2, 64), (5, 1, 20), (70, 2, 8), (4, 4, 3)])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 17, "soft_cap": 1.5, "sinks": True}], ids=["plain", "all"])
def test_a_bfloat16_cache_gives_what_the_same_numbers_give_in_float32(
    heads: tuple[int, int, int], options: dict[str, Any]
) -> None:
    """Bit for bit, rounded once at the end."""
    shape = AttentionShape(*heads, **options)
    batch = make_batch([(30, 1), (0, 1), (LONG, 1), (CHUNK_KEYS, 1)], shape=shape, block_size=16).to(torch.bfloat16)
    assert torch.equal(run("native", batch), run("native", batch.to(torch.float32)).to(torch.bfloat16))


@pytest.mark.parametrize("drafts", ["chain", "tree"])
@pytest.mark.parametrize("number", [1, 3])
def test_drafts(drafts: str, number: int) -> None:
    check(make_batch([(20, number), (3, number)], drafts=drafts))  # type: ignore[arg-type]


def test_scores_so_large_that_exponents_overflow_unless_shifted() -> None:
    batch = make_batch([(40, 1), (LONG, 1), (7, 1)], shape=AttentionShape(4, 2, 16, scale=30.0))
    out = run("native", batch)
    assert out.isfinite().all()
    torch.testing.assert_close(out, run("torch", batch), atol=1e-3, rtol=1e-3)  # scores of hundreds, to 24 bits


@pytest.mark.parametrize("spoilt", [0, 1], ids=["one-chunk", "many"])
@pytest.mark.parametrize("where", ["query", "key"])
def test_what_is_not_a_number_stays_in_its_request_and_is_not_lost(spoilt: int, where: str) -> None:
    batch = make_batch([(9, 1), (LONG, 1), (30, 1)])
    q, past_k = batch.q.clone(), batch.past_k.clone()
    if where == "query":
        q[spoilt, :2, 0] = math.nan
    else:
        past_k[9 * spoilt + 3, 0, 0] = math.nan  # of one key, seen by the two heads that share it
    out, clean = run("native", replace(batch, q=q, past_k=past_k)), run("native", batch)
    assert out[spoilt, :2].isnan().all()
    out[spoilt, :2] = clean[spoilt, :2]
    assert torch.equal(out, clean)


def test_the_mask_of_a_single_draft_is_obeyed() -> None:
    batch = make_batch([(20, 1), (3, 1)], drafts="tree")
    verify = batch.metadata.spec_verify
    assert verify is not None
    assert verify.custom_mask is not None
    mask = verify.custom_mask.clone()
    mask[4:11] = False
    check(replace(batch, metadata=replace(batch.metadata, spec_verify=replace(verify, custom_mask=mask))))


# -- the same whoever else is there ------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("heads", [(8, 2, 64), (5, 1, 20), (40, 8, 16), (36, 4, 16), (70, 2, 8)])
def test_a_request_is_bit_for_bit_the_same_alone_and_on_any_threads(heads: tuple[int, int, int]) -> None:
    rng = random.Random(0)
    lengths = [rng.randrange(3 * CHUNK_KEYS) for _ in range(12)]
    batch = make_batch([(length, 1) for length in lengths], heads=heads, block_size=16)
    whole = run("native", batch)
    for threads in (2, 3):
        assert torch.equal(on_threads(threads, lambda: run("native", batch)), whole)
    for index in range(len(lengths)):
        alone = one_of(batch, index)
        for threads in (1, 2):  # few pieces of work: threads share a request's heads
            out = on_threads(threads, lambda alone=alone: run("native", alone))
            assert torch.equal(out[0], whole[index])


def test_a_mixed_step_decodes_as_a_decode_step_does() -> None:
    decodes = make_batch([(30, 1), (LONG, 1)], block_size=16)
    mixed = make_batch([(30, 1), (LONG, 1), (0, 6)], block_size=16)
    parts = {name: torch.cat((getattr(decodes, name), getattr(mixed, name)[2:])) for name in ("q", "k", "v")}
    cache = mixed.new_cache()
    cache.write(0, decodes.past_k, decodes.past_v, mixed.past_slots)
    plan = make_attention_backend("native", mixed.shape, cache).plan(mixed.metadata)
    out = plan.forward(parts["q"], parts["k"], parts["v"], 0)
    assert torch.equal(out[:2], run("native", decodes))


# -- memory and refusals -----------------------------------------------------------------------------------------------


def test_only_what_is_merged_needs_memory() -> None:
    batch = make_batch([(30, 1), (CHUNK_KEYS - 1, 1)])
    backend = NativeAttentionBackend(batch.shape, batch.new_cache())
    backend.plan(batch.metadata)
    assert backend.nbytes == 0
    backend.plan(make_batch([(CHUNK_KEYS, 1)]).metadata)
    assert backend.nbytes >= 2 * 4 * (8 + 2) * 4  # two parts, four heads


@pytest.mark.parametrize("block", [-1, 999])
def test_a_table_that_names_no_block_is_refused(block: int) -> None:
    batch = make_batch([(30, 1), (40, 1)], block_size=4)
    table = batch.metadata.block_table.clone()
    table[1, 10] = block
    backend = NativeAttentionBackend(batch.shape, batch.new_cache())
    with pytest.raises(KVCacheError, match="block table of request 1"):
        backend.plan(replace(batch.metadata, block_table=table))
    with pytest.raises(KVCacheError, match="11 blocks has a block table of 9"):
        backend.plan(replace(batch.metadata, block_table=table[:, :9]))
    slots = batch.metadata.slot_mapping.clone()
    slots[1] = batch.new_cache().hidden_slot + 4
    with pytest.raises(KVCacheError, match="row 1 has the slot"):
        backend.plan(replace(batch.metadata, slot_mapping=slots))


def test_what_the_kernel_would_read_past_is_refused() -> None:
    batch = make_batch([(30, 1)], shape=AttentionShape(4, 2, 8, sinks=True))
    assert batch.sinks is not None
    plan = NativeAttentionBackend(batch.shape, batch.new_cache()).plan(batch.metadata)
    with pytest.raises(ConfigError, match=r"queries .* torch.float32, not .* in torch.float64"):
        plan.forward(batch.q.double(), batch.k, batch.v, 0, batch.sinks)
    with pytest.raises(ConfigError, match=r"needs queries"):
        plan.forward(batch.q[:, :3], batch.k, batch.v, 0, batch.sinks)
    with pytest.raises(ConfigError, match=r"needs values .* not .* in torch.float64"):
        plan.forward(batch.q, batch.k, batch.v.double(), 0, batch.sinks)
    with pytest.raises(ConfigError, match=r"needs keys"):
        plan.forward(batch.q, batch.k[:, :1], batch.v, 0, batch.sinks)
    with pytest.raises(ConfigError, match="a sink for each of its heads"):
        plan.forward(batch.q, batch.k, batch.v, 0, batch.sinks[:3])


def test_other_caches_are_refused_by_name() -> None:
    batch = make_batch([(30, 1)])
    half = batch.to(torch.float16)
    with pytest.raises(ConfigError, match=r"'native' reads caches of float32 or bfloat16, not torch\.float16"):
        make_attention_backend("native", half.shape, half.new_cache())
    assert UBatchAttention(half.shape, half.new_cache()).decode_name == "torch"
    fp8 = make_batch([(30, 1)], fp8=True)
    with pytest.raises(ConfigError, match="'native' cannot read an fp8 cache"):
        make_attention_backend("native", fp8.shape, fp8.new_cache())


def test_strides_of_any_kind() -> None:
    batch = make_batch([(30, 1), (9, 1)])
    expected = run("native", batch)
    for name in ("q", "k", "v"):
        x = getattr(batch, name)
        for turned in (x.transpose(1, 2).contiguous().transpose(1, 2), x.transpose(0, 1).contiguous().transpose(0, 1)):
            assert turned.stride() != x.stride()
            assert torch.equal(run("native", replace(batch, **{name: turned})), expected)


def test_a_plan_keeps_its_cache_alive() -> None:
    batch = make_batch([(30, 1), (9, 1)])
    plan = make_attention_backend("native", batch.shape, batch.new_cache()).plan(batch.metadata)
    caches = [batch.new_cache() for _ in range(4)]  # would take the freed memory
    for cache in caches:
        cache.key_pool.memory.fill_(3.0)
    assert torch.equal(plan.forward(batch.q, batch.k, batch.v, 0), run("native", batch))


def test_a_decode_step_is_one_call_that_stores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([(30, 1), (0, 0), (9, 1)], padding=2)
    cache, expected = batch.new_cache(), batch.new_cache()
    plan = make_attention_backend("native", batch.shape, cache).plan(batch.metadata)
    out = batch.expected(0, expected)
    monkeypatch.setattr(type(cache), "write", lambda *args: pytest.fail("the kernel stores"))
    torch.testing.assert_close(plan.forward(batch.q, batch.k, batch.v, 0), out, atol=5e-6, rtol=1e-5)
    assert torch.equal(cache.keys(0), expected.keys(0))
    assert torch.equal(cache.values(0), expected.values(0))
