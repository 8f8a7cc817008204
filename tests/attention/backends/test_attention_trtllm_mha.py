"""The `trtllm_mha` back end against the plain reference, on stand-ins that compute what flashinfer is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_batches import Batch, make_batch
from flashinfer_standin import COUNTER_BYTES, FP8, StandIns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from trtllm_cases import install
from trtllm_mha_cases import backend_of, fp8_queries

from attention import AttentionShape, PagedKVCache, UBatchAttention, make_attention_backend, split_attn_metadata
from attention.backends.trtllm import mha as trtllm_mha
from attention.backends.trtllm.mha import TRTLLMMHABackend
from ubatch import ConfigError, ForwardMode, UBatchSlice

DECODE = [(20, 1), (3, 1), (15, 1), (16, 1)]
PREFIX = [(17, 5), (0, 3), (33, 2)]
MIXED = [(40, 1), (0, 6), (9, 4), (5, 1)]
VERIFY = [(9, 3), (30, 3), (1, 3)]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return install(monkeypatch, trtllm_mha, TRTLLMMHABackend)


def forward(batch: Batch, cache: PagedKVCache, layer: int = 0) -> Tensor:
    plan = backend_of(batch, cache).plan(batch.metadata)
    return plan.forward(batch.q, batch.k, batch.v, layer, batch.sinks)


def check(batch: Batch, tolerance: float = 2e-6) -> None:
    """Output and cache equal the reference's, in every layer."""
    fast, slow = batch.new_cache(), batch.new_cache()
    plan = backend_of(batch, fast).plan(batch.metadata)
    for layer in range(batch.spec.num_layers):
        out = plan.forward(batch.q, batch.k, batch.v, layer, batch.sinks)
        expected = batch.expected(layer, slow)
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(fast.keys(layer), slow.keys(layer))
        assert torch.equal(fast.values(layer), slow.values(layer))


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("heads", [(4, 2, 8), (2, 2, 16), (4, 1, 8)], ids=["gqa", "mha", "mqa"])
def test_decode(kernels: StandIns, heads: tuple[int, int, int], block_size: int) -> None:
    check(make_batch(DECODE, heads=heads, block_size=block_size, num_layers=2))
    assert {call.name for call in kernels.calls} == {"decode"}


@pytest.mark.parametrize("requests", [[(0, 4), (0, 2)], PREFIX, MIXED], ids=["fresh", "prefix", "mixed"])
def test_ragged_queries_go_to_the_context_kernel(kernels: StandIns, requests: list[tuple[int, int]]) -> None:
    check(make_batch(requests, block_size=16))
    assert {call.name for call in kernels.calls} == {"context"}


def test_verifying_a_chain_is_one_decode_call(kernels: StandIns) -> None:
    check(make_batch(VERIFY, block_size=16, drafts="chain"))
    assert [call.arguments["q_len_per_req"] for call in kernels.calls] == [3]


def test_draft_extend_is_ragged(kernels: StandIns) -> None:
    check(make_batch([(9, 2), (20, 4), (5, 1)], block_size=16, mode=ForwardMode.DRAFT_EXTEND))
    assert [call.name for call in kernels.calls] == ["context"]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=6),
    block_size=st.sampled_from([16, 32, 64]),
    padding=st.integers(0, 3),
    window=st.sampled_from([None, 1, 5]),
    sinks=st.booleans(),
    fp8=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_batch(
    kernels: StandIns,
    requests: list[tuple[int, int]],
    block_size: int,
    padding: int,
    window: int | None,
    sinks: bool,
    fp8: bool,
    seed: int,
) -> None:
    shape = AttentionShape(4, 2, 8, sliding_window=window, sinks=sinks)
    requests = [(prefix if new else 0, new) for prefix, new in requests]
    batch = make_batch(requests, shape=shape, block_size=block_size, padding=padding, fp8=fp8, seed=seed)
    check(fp8_queries(batch), tolerance=2e-5)


def test_draft_decode_sees_what_the_step_before_drafted(kernels: StandIns) -> None:
    """Three steps of a draft model, each of sequences one token longer, equal one causal step of three tokens."""
    whole = make_batch([(14, 3), (30, 3)], block_size=16)
    cache = whole.new_cache()
    backend = backend_of(whole, cache)
    expected = whole.expected()
    for step in range(3):
        rows = torch.tensor([step, 3 + step])
        metadata = type(whole.metadata).build(
            [1, 1], [15 + step, 31 + step], whole.metadata.block_table, whole.metadata.slot_mapping[rows],
            ForwardMode.DECODE,
        )  # fmt: skip
        out = backend.plan(metadata).forward(whole.q[rows], whole.k[rows], whole.v[rows], 0)
        torch.testing.assert_close(out, expected[rows], atol=2e-6, rtol=2e-6)
    assert [call.arguments["max_seq_len"] for call in kernels.calls] == [31, 32, 33]


@pytest.mark.parametrize("requests", [DECODE, PREFIX], ids=["decode", "prefix"])
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 4},
        {"sliding_window": 1},
        {"sinks": True},
        {"scale": 0.9},
        {"sliding_window": 7, "sinks": True},
    ],
)
def test_options(kernels: StandIns, options: dict[str, object], requests: list[tuple[int, int]]) -> None:
    shape = AttentionShape(4, 2, 8, **options)  # type: ignore[arg-type]
    check(make_batch(requests, shape=shape, block_size=16))
    check(make_batch(VERIFY, shape=shape, block_size=16, drafts="chain"))


def test_sinks_that_the_shape_does_not_expect_are_refused(kernels: StandIns) -> None:
    plain = make_batch(DECODE, block_size=16)
    sinks = make_batch(DECODE, shape=AttentionShape(4, 2, 8, sinks=True), block_size=16)
    for batch in (replace(plain, sinks=sinks.sinks), replace(sinks, sinks=None)):
        with pytest.raises(ConfigError, match=r"sinks is (True|False), but sinks were (not )?given"):
            forward(batch, batch.new_cache())


def test_sinks_are_float32_for_the_kernel(kernels: StandIns) -> None:
    batch = make_batch(DECODE, shape=AttentionShape(4, 2, 8, sinks=True), block_size=16)
    assert batch.sinks is not None
    check(replace(batch, sinks=batch.sinks.to(torch.bfloat16)))


@pytest.mark.parametrize("requests", [DECODE, PREFIX, MIXED], ids=["decode", "prefix", "mixed"])
def test_fp8_cache_is_read_with_its_scales(kernels: StandIns, requests: list[tuple[int, int]]) -> None:
    check(fp8_queries(make_batch(requests, block_size=16, num_layers=2, fp8=True)), tolerance=1e-5)
    call = kernels.calls[-1].arguments
    assert call["query"].dtype == call["kv_cache"][0].dtype == FP8


def test_fp8_output_without_the_scale_of_values_is_far_off(kernels: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = fp8_queries(make_batch(DECODE, block_size=16, fp8=True))
    monkeypatch.setattr(PagedKVCache, "scales", lambda self, layer: (self.key_pool.scales[layer], 1.0))
    error = (forward(batch, batch.new_cache()) - batch.expected()).abs().max()
    assert error > 10


def test_fp8_queries_are_rounded_and_no_more(kernels: StandIns) -> None:
    batch = make_batch(DECODE, block_size=16, fp8=True)
    error = (forward(batch, batch.new_cache()) - batch.expected()).abs().max()
    assert 1e-6 < error < 0.12


def test_half_precision(kernels: StandIns) -> None:
    batch = make_batch(MIXED, block_size=16)
    spec = replace(batch.spec, dtype=torch.bfloat16)
    cache = PagedKVCache(spec, batch.num_blocks)
    cache.write(0, batch.past_k.bfloat16(), batch.past_v.bfloat16(), batch.past_slots)
    plan = backend_of(batch, cache).plan(batch.metadata)
    out = plan.forward(batch.q.bfloat16(), batch.k.bfloat16(), batch.v.bfloat16(), 0)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), batch.expected(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("requests", [[(0, 0), (20, 1), (0, 0), (3, 1), (0, 0)], [(5, 3), (0, 0), (9, 2), (0, 0)]])
def test_padding_rows_are_zero_and_padding_requests_are_left_out(
    kernels: StandIns, requests: list[tuple[int, int]]
) -> None:
    check(make_batch(requests, block_size=16, padding=3))


def test_an_idle_batch_calls_nothing(kernels: StandIns) -> None:
    batch = make_batch([(0, 0)], block_size=16, padding=2)
    assert not forward(batch, batch.new_cache()).any()
    assert not kernels.calls


def test_pools_are_read_in_place(kernels: StandIns) -> None:
    """By head, as views: nothing of the cache is copied."""
    batch = make_batch(DECODE, block_size=16)
    cache = batch.new_cache()
    forward(batch, cache)
    keys, values = kernels.calls[0].arguments["kv_cache"]
    assert keys.data_ptr() == cache.keys(0).data_ptr()
    assert values.data_ptr() == cache.values(0).data_ptr()
    assert keys.shape == (batch.num_blocks, 2, 16, 8)


def test_workspace_is_made_with_the_first_plan(kernels: StandIns) -> None:
    batch = make_batch(DECODE, block_size=16)
    backend = backend_of(batch, batch.new_cache())
    assert backend.nbytes == 0
    backend.plan(batch.metadata)
    assert backend.nbytes == 4 * COUNTER_BYTES


def test_stand_ins_refuse_what_kernels_would_misread(kernels: StandIns) -> None:
    """Poison in a table, a sequence longer than was said, counters that are not zero, another lane's workspace."""
    batch = make_batch(DECODE, block_size=16)
    backend = backend_of(batch, batch.new_cache())
    plan = backend.plan(batch.metadata)

    def refused(message: str) -> None:
        with pytest.raises(AssertionError, match=message):
            plan.forward(batch.q, batch.k, batch.v, 0)

    table = plan.call.block_table.clone()
    plan.call.block_table[1, -1] = -1
    refused("before the first")
    plan.call.block_table[1, -1] = batch.num_blocks
    refused("behind the last")
    plan.call.block_table.copy_(table)
    plan.call.seq_lens[0] += 1
    refused("longer than max_seq_len")
    plan.call.seq_lens[0] -= 1
    backend.workspace.get()[7] = 1
    refused("counters are not zero")
    backend.workspace.get()[7] = 0
    plan.forward(batch.q, batch.k, batch.v, 0)
    kernels.lane = "another"
    refused("whole and another share a workspace")


# -------------------------------------------------------------------------------------------------------------- lanes


def test_lanes_have_their_own_workspaces(kernels: StandIns) -> None:
    """A prompt straddles the cut; the stand-ins refuse a workspace that two lanes use."""
    batch = make_batch([(20, 1), (3, 5), (0, 6), (15, 1)], block_size=16, num_layers=2)
    cache, slow = batch.new_cache(), batch.new_cache()
    attention = UBatchAttention(batch.shape, cache, "trtllm_mha")
    lanes = [UBatchSlice(slice(0, 3), slice(0, 8)), UBatchSlice(slice(2, 4), slice(8, 13))]
    plans = attention.plan_lanes(split_attn_metadata(lanes, batch.metadata))
    for layer in range(2):
        outs = []
        for number, (lane, plan) in enumerate(zip(lanes, plans, strict=True)):
            kernels.lane = f"lane {number}"
            rows = lane.token_slice
            outs.append(plan.forward(batch.q[rows], batch.k[rows], batch.v[rows], layer))
        torch.testing.assert_close(torch.cat(outs), batch.expected(layer, slow), atol=2e-6, rtol=2e-6)
    kernels.lane = "whole"
    attention.plan(batch.metadata).forward(batch.q, batch.k, batch.v, 0)
    assert set(attention.memory().values()) == {4 * COUNTER_BYTES}
    assert len(attention.memory()) == 3


# ----------------------------------------------------------------------------------------------------------- refusals


def test_trees_are_refused_by_name(kernels: StandIns) -> None:
    batch = make_batch(VERIFY, block_size=16, drafts="tree")
    with pytest.raises(ConfigError, match="'trtllm_mha' takes no tree mask"):
        backend_of(batch, batch.new_cache()).plan(batch.metadata)


@pytest.mark.parametrize(
    ("block_size", "options", "message"), [(128, {}, "pages of 16"), (16, {"soft_cap": 3.0}, "cap")]
)
def test_what_the_kernels_lack_is_refused(
    kernels: StandIns, block_size: int, options: dict[str, float], message: str
) -> None:
    batch = make_batch(DECODE, shape=AttentionShape(4, 2, 8, **options), block_size=block_size)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        make_attention_backend("trtllm_mha", batch.shape, batch.new_cache())


def test_other_gpus_decode_only_or_are_refused(kernels: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((9, 0), (12, 0)):
        monkeypatch.setattr(trtllm_mha, "compute_capability", lambda device, found=capability: found)
        batch = make_batch(DECODE, block_size=16)
        check(batch)
        prompts = make_batch(PREFIX, block_size=16)
        with pytest.raises(ConfigError, match="--prefill-attention-backend"):
            backend_of(prompts, prompts.new_cache()).plan(prompts.metadata)
    monkeypatch.setattr(trtllm_mha, "compute_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="SM80"):
        backend_of(batch, batch.new_cache())


def test_queries_stay_as_they_are_on_xqa(kernels: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtllm_mha, "compute_capability", lambda device: (9, 0))
    kernels.xqa = True
    check(make_batch(DECODE, block_size=16, fp8=True), tolerance=1e-5)
    assert kernels.calls[0].arguments["query"].dtype == torch.float32
