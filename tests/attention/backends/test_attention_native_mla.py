"""Latent attention in C: with every kind of instructions against `torch`, and to the last bit against itself.

`test_attention_torch_mla` compares it with the oracle.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention_batches import MLABatch, make_mla_batch
from c_kernels import KINDS, needs_c, use_instructions
from torch import Tensor
from torch_threads import on_threads

from attention import MLAInputs, MLAShape, UBatchAttention, make_attention_backend, split_attn_metadata
from attention.backends.native import mla as native
from attention.backends.native.mla import NativeMLABackend
from attention.backends.native.requests import CHUNK_KEYS
from attention.kv_cache import KVCacheError
from ubatch import ConfigError, UBatchSlice, split_fixed

pytestmark = [needs_c, pytest.mark.long]

LONG = 2 * CHUNK_KEYS + 45
SMALL = MLAShape(3, 16, 2, 4, 3, scale=0.8)
ODD = MLAShape(20, 90, 41, 34, 47)
WIDE = MLAShape(16, 128, 64, 64, 64)


def run(batch: MLABatch, name: str = "native") -> Tensor:
    """One layer by the named back end."""
    return make_attention_backend(name, batch.shape, batch.new_cache()).plan(batch.metadata).forward(batch.inputs, 0)


def rows_of(inputs: MLAInputs, rows: slice) -> MLAInputs:
    names = ("q_nope", "q_rope", "latent", "k_rope")
    rope = replace(inputs.rope, positions=inputs.rope.positions[rows])
    return replace(inputs, rope=rope, **{name: getattr(inputs, name)[rows] for name in names})


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind: str = request.param
    use_instructions(monkeypatch, native, KINDS[kind])
    return kind


# -- right -------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("shape", [SMALL, ODD, WIDE], ids=["small", "odd", "wide"])
def test_every_kind_of_instructions(shape: MLAShape, block_size: int, interleaved: bool) -> None:
    """Decodes, drafts, chunks that are merged, and a prompt: as close to float32 as torch is in bfloat16."""
    requests = [(LONG, 1), (CHUNK_KEYS - 1, 1), (0, 1), (63, 3), (300, 2), (0, 40)]
    batch = make_mla_batch(requests, shape=shape, block_size=block_size, padding=2, interleaved=interleaved)
    torch.testing.assert_close(run(batch), run(batch, "torch"), atol=5e-6, rtol=1e-5)
    half = batch.to(torch.bfloat16)
    exact = run(half.to(torch.float32), "torch")
    own, others = (run(half, name).float() - exact for name in ("native", "torch"))
    assert own.abs().max() < 0.02 * exact.abs().max()
    assert own.square().mean() < 1.05 * others.square().mean()


def test_scores_so_large_that_exponents_overflow_unless_shifted() -> None:
    batch = make_mla_batch([(40, 1), (LONG, 1), (7, 1)], shape=replace(SMALL, scale=60.0))
    for dtype in (torch.float32, torch.bfloat16):
        assert run(batch.to(dtype)).isfinite().all()
    torch.testing.assert_close(run(batch), run(batch, "torch"), atol=1e-3, rtol=1e-3)  # scores of hundreds, to 24 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spoilt", [0, 1], ids=["one-chunk", "many"])
def test_what_is_not_a_number_stays_in_its_request_and_is_not_lost(spoilt: int, dtype: torch.dtype) -> None:
    batch = make_mla_batch([(9, 1), (LONG, 1), (30, 1)], shape=WIDE, block_size=16).to(dtype)
    past = batch.past_latent.clone()
    past[9 * spoilt + 3, 0] = torch.nan
    out, clean = run(replace(batch, past_latent=past)), run(batch)
    assert out[spoilt].isnan().all()
    out[spoilt] = clean[spoilt]
    assert torch.equal(out, clean)


# -- the same whoever else is there ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SMALL, ODD, replace(WIDE, num_heads=40)], ids=["small", "odd", "wide"])
def test_a_request_is_bit_for_bit_the_same_alone_and_on_any_threads(shape: MLAShape, dtype: torch.dtype) -> None:
    lengths = [0, 3, 40, CHUNK_KEYS - 1, CHUNK_KEYS, LONG, 100, 7, 11, 300]
    batch = make_mla_batch([(length, 1) for length in lengths], shape=shape, block_size=16).to(dtype)
    whole = run(batch)
    for threads in (2, 3):
        assert torch.equal(on_threads(threads, lambda: run(batch)), whole)
    parts = split_attn_metadata(split_fixed(len(lengths), num_ubatches=len(lengths)), batch.metadata)
    for index, part in enumerate(parts):
        alone = replace(batch, metadata=part, inputs=rows_of(batch.inputs, slice(index, index + 1)))
        for threads in (1, 2):  # few pieces of work: threads share a request's heads
            assert torch.equal(on_threads(threads, lambda alone=alone: run(alone))[0], whole[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_and_decodes_beside_prompts_give_the_bits_of_decodes(dtype: torch.dtype) -> None:
    batch = make_mla_batch([(LONG, 3), (70, 1), (0, 30)], shape=WIDE, block_size=16, padding=1).to(dtype)
    cache = batch.new_cache()
    plan = make_attention_backend("native", batch.shape, cache).plan(batch.metadata)
    out = plan.forward(batch.inputs, 0)
    assert not out[-1].any()
    for row in range(4):
        rows = slice(row, row + 1)
        request, length = (0, LONG + row + 1) if row < 3 else (1, 71)
        metadata = type(batch.metadata).build(
            [1], [length], batch.metadata.block_table[request : request + 1], batch.metadata.slot_mapping[rows]
        )
        alone = make_attention_backend("native", batch.shape, cache).plan(metadata)
        assert torch.equal(alone.forward(rows_of(batch.inputs, rows), 0)[0], out[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_is_bit_for_bit_the_same_alone_on_any_threads_and_wherever_it_is_cut(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_mla_batch([(20, 150), (0, 70), (40, 1)], shape=WIDE, block_size=16).to(dtype)
    whole = run(batch)
    for threads in (2, 3):
        assert torch.equal(on_threads(threads, lambda: run(batch)), whole)
    backend = make_attention_backend("native", batch.shape, batch.new_cache())
    lanes = [UBatchSlice(slice(0, 1), slice(start, stop)) for start, stop in pairwise([0, 57, 150])]
    lanes.append(UBatchSlice(slice(1, 3), slice(150, 221)))
    for metadata, lane in zip(split_attn_metadata(lanes, batch.metadata), lanes, strict=True):
        rows = lane.token_slice
        assert torch.equal(backend.plan(metadata).forward(rows_of(batch.inputs, rows), 0), whole[rows])
    small = native._load_kernel(dtype, MOST_ROWS=32)
    monkeypatch.setattr(native, "_kernel", lambda dtype: small)
    assert torch.equal(run(batch), whole)


def test_more_tokens_than_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_mla_batch([(LONG, 1), (9, 4), (0, 1), (20, 3)], shape=SMALL, padding=1)
    expected = run(batch)
    whole = native._kernel(torch.float32)
    assert whole.most_tokens == 256
    monkeypatch.setattr(native, "_kernel", lambda dtype: replace(whole, most_tokens=2))
    assert torch.equal(run(batch), expected)


# -- memory and refusals -----------------------------------------------------------------------------------------------


def test_a_decode_step_is_one_call_that_stores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_mla_batch([(30, 1), (0, 0), (9, 1)], padding=2)
    cache, expected = batch.new_cache(), batch.new_cache()
    plan = make_attention_backend("native", batch.shape, cache).plan(batch.metadata)
    out = batch.expected(0, expected)
    monkeypatch.setattr(type(cache), "write", lambda *args: pytest.fail("the kernel stores"))
    torch.testing.assert_close(plan.forward(batch.inputs, 0), out, atol=5e-6, rtol=1e-5)
    assert torch.equal(cache.rows(0), expected.rows(0))


def test_more_threads_than_when_it_was_planned() -> None:
    batch = make_mla_batch([(150, 1), (90, 2), (0, 9)], shape=WIDE, block_size=16)

    def compute() -> Tensor:
        torch.set_num_threads(1)
        plan = make_attention_backend("native", batch.shape, batch.new_cache()).plan(batch.metadata)
        torch.set_num_threads(3)
        return plan.forward(batch.inputs, 0)

    assert torch.equal(on_threads(1, compute), run(batch))


def test_a_plan_keeps_its_cache_alive() -> None:
    batch = make_mla_batch([(30, 1), (9, 1)])
    plan = make_attention_backend("native", batch.shape, batch.new_cache()).plan(batch.metadata)
    for cache in [batch.new_cache() for _ in range(4)]:  # would take the freed memory
        cache.pool.memory.fill_(3.0)
    assert torch.equal(plan.forward(batch.inputs, 0), run(batch))


def test_strides_of_any_kind() -> None:
    batch = make_mla_batch([(30, 1), (9, 2)])
    expected = run(batch)
    for name in ("q_nope", "q_rope", "latent", "k_rope", "w_uk", "w_uv"):
        x = getattr(batch.inputs, name)
        turned = x.transpose(0, -1).contiguous().transpose(0, -1)
        assert turned.stride() != x.stride()
        assert torch.equal(run(replace(batch, inputs=replace(batch.inputs, **{name: turned}))), expected)


@pytest.mark.parametrize("block", [-1, 999])
def test_tables_and_slots_that_name_no_block_are_refused(block: int) -> None:
    batch = make_mla_batch([(30, 1), (40, 1)], block_size=4)
    table, slots = batch.metadata.block_table.clone(), batch.metadata.slot_mapping.clone()
    table[1, 10] = block
    backend = NativeMLABackend(batch.shape, batch.new_cache())
    with pytest.raises(KVCacheError, match="block table of request 1"):
        backend.plan(replace(batch.metadata, block_table=table))
    with pytest.raises(KVCacheError, match="11 blocks has a block table of 9"):
        backend.plan(replace(batch.metadata, block_table=table[:, :9]))
    slots[1] = batch.new_cache().hidden_slot + 4
    with pytest.raises(KVCacheError, match="row 1 has the slot"):
        backend.plan(replace(batch.metadata, slot_mapping=slots))


def test_what_the_kernel_would_read_past_is_refused() -> None:
    batch = make_mla_batch([(30, 1), (9, 1)])
    plan = NativeMLABackend(batch.shape, batch.new_cache()).plan(batch.metadata)
    inputs, rope = batch.inputs, batch.inputs.rope
    for name, what in (("q_nope", "queries"), ("q_rope", "rotated queries"), ("latent", "latents"), ("w_uv", "w_uv")):
        x = getattr(inputs, name)
        for wrong in (x.double(), x[:1], x[..., :1]):
            with pytest.raises(ConfigError, match=f"needs {what} "):
                plan.forward(replace(inputs, **{name: wrong}), 0)
    with pytest.raises(ConfigError, match="need a rotary table"):
        plan.forward(replace(inputs, rope=replace(rope, cos_sin=rope.cos_sin[:, :2])), 0)
    with pytest.raises(ConfigError, match="token 0 is at position 30, and the rotary table ends at 30"):
        plan.forward(replace(inputs, rope=replace(rope, cos_sin=rope.cos_sin[:30])), 0)


def test_other_caches_are_refused_by_name() -> None:
    half = make_mla_batch([(30, 1)]).to(torch.float16)
    with pytest.raises(ConfigError, match=r"'native' reads caches of float32 or bfloat16, not torch\.float16"):
        make_attention_backend("native", half.shape, half.new_cache())
    assert UBatchAttention(half.shape, half.new_cache()).decode_name == "torch"
    fp8 = make_mla_batch([(30, 1)], fp8=True)
    with pytest.raises(ConfigError, match="'native_mla' cannot read an fp8 cache"):
        make_attention_backend("native", fp8.shape, fp8.new_cache())
    assert UBatchAttention(fp8.shape, fp8.new_cache()).decode_name == "torch"
