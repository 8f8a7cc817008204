"""The `trtllm_mla` back end against the plain reference, on stand-ins that compute what flashinfer is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_batches import MLABatch, make_mla_batch
from flashinfer_standin import COUNTER_BYTES, FP8, StandIns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from trtllm_cases import check_replan_allocates_nothing, check_same_call, install

from attention import (
    GraphLimits,
    MLAKVCache,
    MLAShape,
    UBatchAttention,
    make_attention_backend,
    split_attn_metadata,
)
from attention.backends.trtllm import mla as trtllm_mla
from attention.backends.trtllm import mla_prefill as trtllm_mla_prefill
from attention.backends.trtllm.mla import TRTLLMMLABackend, padded_blocks
from attention.kv_cache import quantize_fp8
from ubatch import ConfigError, ForwardMode, UBatchSlice

pytestmark = pytest.mark.long

SHAPE = MLAShape(num_heads=2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
DECODE = [(40, 1), (3, 1), (31, 1), (32, 1)]
PREFIX = [(33, 5), (0, 3), (70, 2)]
MIXED = [(40, 1), (0, 6), (9, 4), (5, 1)]
VERIFY = [(9, 3), (62, 3), (1, 3)]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return install(monkeypatch, trtllm_mla, TRTLLMMLABackend)


def make(requests: list[tuple[int, int]], **options: object) -> MLABatch:
    options = {"shape": SHAPE, "block_size": 32, **options}
    return make_mla_batch(requests, **options)  # type: ignore[arg-type]


def backend_of(batch: MLABatch, cache: MLAKVCache) -> TRTLLMMLABackend:
    backend = make_attention_backend("trtllm_mla", batch.shape, cache)
    assert isinstance(backend, TRTLLMMLABackend)
    return backend


def filled(batch: MLABatch, num_blocks: int | None = None) -> MLAKVCache:
    """A cache with the batch's prefixes in every layer and scales of 1."""
    cache = MLAKVCache(batch.spec, num_blocks or batch.num_blocks)
    for layer in range(batch.spec.num_layers):
        cache.write(layer, batch.past_latent, batch.past_k_rope, batch.past_slots)
    return cache


def check(batch: MLABatch, tolerance: float = 1e-5) -> None:
    """Output and cache equal the reference's, in every layer."""
    fast, slow = filled(batch), filled(batch)
    plan = backend_of(batch, fast).plan(batch.metadata)
    for layer in range(batch.spec.num_layers):
        out = plan.forward(batch.inputs, layer)
        torch.testing.assert_close(out, batch.expected(layer, slow), atol=tolerance, rtol=tolerance)
        assert torch.equal(fast.rows(layer), slow.rows(layer))


def exact_in_fp8(batch: MLABatch) -> MLABatch:
    """The same with queries and latents that fp8 holds exactly, also after absorption and rotation.

    Each number of a query goes to one number of the latent's space, and rotations are by quarters of a circle.
    """
    inputs, shape = batch.inputs, batch.shape

    def rounded(x: Tensor) -> Tensor:
        return quantize_fp8(x.contiguous(), 1.0).view(FP8).float()

    w_uk = torch.zeros_like(inputs.w_uk)
    for head in range(shape.num_heads):
        chosen = torch.randperm(shape.kv_lora_rank)[: shape.qk_nope_head_dim]
        w_uk[head, torch.arange(shape.qk_nope_head_dim), chosen] = 1.0
    quarters = torch.randint(4, (1024, shape.qk_rope_head_dim // 2)) * (torch.pi / 2)
    cos_sin = torch.cat((quarters.cos(), quarters.sin()), dim=-1).round()
    return replace(
        batch,
        inputs=replace(
            inputs,
            q_nope=rounded(inputs.q_nope),
            q_rope=rounded(inputs.q_rope),
            latent=rounded(inputs.latent),
            k_rope=rounded(inputs.k_rope),
            w_uk=w_uk,
            rope=replace(inputs.rope, cos_sin=cos_sin),
        ),
    )


# ------------------------------------------------------------------------------------------------------- page tables


def test_tables_are_padded_to_both_tiles() -> None:
    assert padded_blocks(8192 // 64, 64) == 128
    assert padded_blocks(-(-4097 // 64), 64) == 128
    assert padded_blocks(1, 64) == 64
    assert padded_blocks(1, 32) == 128
    assert padded_blocks(0, 32) == 0
    assert padded_blocks(33, 128) == 64
    for block_size in (16, 32, 64, 128):
        for num_blocks in range(1, 300, 7):
            width = padded_blocks(num_blocks, block_size)
            assert width >= num_blocks
            assert width * block_size % 4096 == 0


def test_pages_larger_than_a_tile_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 128"):
        padded_blocks(4, 256)


# ------------------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("block_size", [32, 64])
def test_decode_is_absorbed(kernels: StandIns, block_size: int) -> None:
    check(make(DECODE, block_size=block_size, num_layers=2))
    assert {call.name for call in kernels.calls} == {"mla_decode"}


def test_verifying_a_chain_is_absorbed(kernels: StandIns) -> None:
    check(make(VERIFY, drafts="chain"))
    assert [call.arguments["query"].shape for call in kernels.calls] == [(3, 3, 2, 576)]


def test_draft_extend_is_padded(kernels: StandIns) -> None:
    check(make([(9, 2), (62, 4), (5, 1)], mode=ForwardMode.DRAFT_EXTEND))
    call = kernels.calls[0].arguments
    assert call["query"].shape == (3, 4, 2, 576)
    assert call["seq_lens"].tolist() == [13, 66, 9]


def test_draft_extend_tables_reach_as_far_as_the_padding(kernels: StandIns) -> None:
    """A request that fills its row of the table is padded past it; the stand-in refuses a table that ends before."""
    batch = make([(4095, 1), (3, 5)], mode=ForwardMode.DRAFT_EXTEND)
    rope = replace(batch.inputs.rope, positions=batch.inputs.rope.positions % 1024)
    check(replace(batch, inputs=replace(batch.inputs, rope=rope)))
    call = kernels.calls[0].arguments
    assert call["block_tables"].shape[1] * 32 >= int(call["seq_lens"].max()) == 4100


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("requests", [[(0, 4), (0, 2)], PREFIX], ids=["fresh", "prefix"])
def test_prompts_are_expanded(kernels: StandIns, requests: list[tuple[int, int]], interleaved: bool) -> None:
    check(make(requests, interleaved=interleaved, num_layers=2))
    assert {call.name for call in kernels.calls} == {"ragged"}


def test_a_mixed_batch_decodes_absorbed_and_expands_the_rest(kernels: StandIns) -> None:
    check(make(MIXED))
    assert [call.name for call in kernels.calls] == ["mla_decode", "ragged", "ragged"]


@pytest.mark.parametrize("limit", [1, 100, 200], ids=lambda limit: f"{limit} tokens")
def test_a_prefix_is_expanded_in_chunks(kernels: StandIns, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Chunks hold whole pages, skip requests whose prefix has ended, and stay within the limit, or one page each."""
    monkeypatch.setattr(trtllm_mla_prefill, "EXPANDED_TOKENS", limit)
    check(make([(100, 2), (0, 3), (33, 4), (64, 2)]))
    chunks = [call.arguments for call in kernels.calls if not call.arguments["is_causal"]]
    assert len(chunks) == {1: 4, 100: 4, 200: 4}[limit]
    assert all(len(chunk["key"]) <= max(limit, 4 * 32) for chunk in chunks)
    assert [len(chunk["seq_lens"]) for chunk in chunks] == [3, 3, 1, 1]


def test_a_long_prefix_in_one_chunk(kernels: StandIns) -> None:
    check(make([(100, 2), (0, 3), (33, 4)]))
    assert [call.arguments["is_causal"] for call in kernels.calls] == [True, False]


def test_requests_may_share_a_block_that_one_of_them_fills(kernels: StandIns) -> None:
    """The later request decodes over a prefix that the earlier one computes in this very step."""
    batch = make([(0, 33), (33, 1)])
    table = batch.metadata.block_table.clone()
    table[1, :2] = table[0, :2]
    slots = batch.metadata.slot_mapping.clone()
    slots[33] = table[0, 1] * 32 + 1
    shared = replace(
        batch,
        metadata=replace(batch.metadata, block_table=table, slot_mapping=slots, mode=ForwardMode.MIXED),
        past_slots=batch.past_slots[:0],
        past_latent=batch.past_latent[:0],
        past_k_rope=batch.past_k_rope[:0],
    )
    check(shared)


@pytest.mark.parametrize("requests", [[(0, 0), (40, 1), (0, 0), (3, 1), (0, 0)], [(5, 3), (0, 0), (9, 2), (3, 1)]])
def test_padding_rows_are_zero_and_padding_requests_are_left_out(
    kernels: StandIns, requests: list[tuple[int, int]]
) -> None:
    check(make(requests, padding=3))


def test_an_idle_batch_calls_nothing(kernels: StandIns) -> None:
    batch = make([(0, 0)], padding=2)
    assert not backend_of(batch, filled(batch)).plan(batch.metadata).forward(batch.inputs, 0).any()
    assert not kernels.calls


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 5)), max_size=5),
    mode=st.sampled_from([ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND]),
    block_size=st.sampled_from([32, 64]),
    padding=st.integers(0, 3),
    limit=st.sampled_from([1, 70, 1000]),
    fp8=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_batch(
    kernels: StandIns,
    requests: list[tuple[int, int]],
    mode: ForwardMode,
    block_size: int,
    padding: int,
    limit: int,
    fp8: bool,
    seed: int,
) -> None:
    kernels.exact = True
    requests = [(prefix if new else 0, new) for prefix, new in requests]
    options = {"mode": mode, "block_size": block_size, "padding": padding, "fp8": fp8, "seed": seed}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trtllm_mla_prefill, "EXPANDED_TOKENS", limit)
        check(exact_in_fp8(make(requests, **options)), tolerance=2e-5)


def test_custom_scale(kernels: StandIns) -> None:
    shape = replace(SHAPE, scale=0.02)
    check(make(DECODE, shape=shape))
    check(make(PREFIX, shape=shape))


def test_half_precision(kernels: StandIns) -> None:
    batch = make(MIXED)
    low = replace(
        batch,
        spec=replace(batch.spec, dtype=torch.bfloat16),
        inputs=replace(
            batch.inputs,
            **{
                name: getattr(batch.inputs, name).bfloat16()
                for name in ("q_nope", "q_rope", "latent", "k_rope", "w_uk", "w_uv")
            },
        ),
        past_latent=batch.past_latent.bfloat16(),
        past_k_rope=batch.past_k_rope.bfloat16(),
    )
    out = backend_of(low, filled(low)).plan(low.metadata).forward(low.inputs, 0)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), batch.expected(0, filled(batch)), atol=0.03, rtol=0.03)


# ---------------------------------------------------------------------------------------------------------------- fp8


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize(
    ("requests", "options"),
    [
        (DECODE, {}),
        (VERIFY, {"drafts": "chain"}),
        ([(9, 2), (62, 4), (5, 1)], {"mode": ForwardMode.DRAFT_EXTEND}),
        (MIXED, {"padding": 2}),
    ],
    ids=["decode", "verify", "draft extend", "mixed"],
)
def test_fp8_is_rotated_and_quantised_by_the_fused_kernel(
    kernels: StandIns, requests: list[tuple[int, int]], options: dict[str, object], interleaved: bool
) -> None:
    kernels.exact = True
    check(exact_in_fp8(make(requests, fp8=True, interleaved=interleaved, **options)))
    call = kernels.named("mla_decode")[0].arguments
    assert call["query"].dtype == call["kv_cache"].dtype == FP8
    assert kernels.named("rope_quantize")


def test_fp8_prompts_read_what_is_stored(kernels: StandIns) -> None:
    """New tokens, too, although they are at hand before they are rounded."""
    check(make(PREFIX, fp8=True, num_layers=2), tolerance=1e-5)
    assert not kernels.named("rope_quantize")


def test_fp8_queries_are_rounded_and_no_more(kernels: StandIns) -> None:
    batch = make(DECODE, fp8=True)
    out = backend_of(batch, filled(batch)).plan(batch.metadata).forward(batch.inputs, 0)
    error = (out - batch.expected(0, filled(batch))).abs().max()
    assert 1e-6 < error < 0.1


def test_fp8_scales_other_than_one_are_refused(kernels: StandIns) -> None:
    batch = make(DECODE, fp8=True, num_layers=2)
    cache = filled(batch)
    cache.set_scale(1, 0.5)
    with pytest.raises(ConfigError, match=r"layer 1 of the cache has 0\.5"):
        backend_of(batch, cache).plan(batch.metadata)


# -------------------------------------------------------------------------------------------------------------- lanes


def test_lanes_have_their_own_workspaces(kernels: StandIns) -> None:
    """A prompt straddles the cut; the stand-ins refuse a workspace that two lanes use."""
    batch = make([(20, 1), (40, 5), (0, 6), (15, 1)], num_layers=2)
    cache, slow = filled(batch), filled(batch)
    attention = UBatchAttention(batch.shape, cache, "trtllm_mla")
    lanes = [UBatchSlice(slice(0, 3), slice(0, 8)), UBatchSlice(slice(2, 4), slice(8, 13))]
    plans = attention.plan_lanes(split_attn_metadata(lanes, batch.metadata))
    for layer in range(2):
        outs = []
        for number, (lane, plan) in enumerate(zip(lanes, plans, strict=True)):
            kernels.lane = f"lane {number}"
            outs.append(plan.forward(trtllm_mla._rows(batch.inputs, lane.token_slice), layer))
        torch.testing.assert_close(torch.cat(outs), batch.expected(layer, slow), atol=1e-5, rtol=1e-5)
    kernels.lane = "whole"
    attention.plan(batch.metadata).forward(batch.inputs, 0)
    assert list(attention.memory().values()) == [4 * COUNTER_BYTES] * 3


# ------------------------------------------------------------------------------------------------------------- graphs

LIMITS = GraphLimits(max_reqs=6, max_tokens=24, max_seq_len=128)
GRAPHS = {
    "decode": (1, {"mode": ForwardMode.DECODE}, [(5, 1), (20, 1), (9, 1), (2, 1)], [(70, 1), (33, 1), (127, 1)]),
    "verify": (3, {"drafts": "chain"}, [(5, 3), (20, 3), (9, 3), (2, 3)], [(70, 3), (125, 3)]),
    "draft extend": (
        3, {"mode": ForwardMode.DRAFT_EXTEND}, [(5, 3), (20, 1), (9, 2), (2, 3)], [(70, 1), (127, 1), (40, 2)],
    ),
}  # fmt: skip


def padded(requests: list[tuple[int, int]], num_reqs: int, num_queries: int, **options: object) -> MLABatch:
    """A batch as a runner pads it for a graph."""
    rows = sum(new for _, new in requests)
    return make(requests + [(0, 0)] * (num_reqs - len(requests)), padding=num_reqs * num_queries - rows, **options)


@pytest.mark.sample(3)
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_replay_longer_than_the_capture(kernels: StandIns, kind: str, fp8: bool) -> None:
    """The captured call, with its tensors and scalars as they were, computes the later batch."""
    kernels.exact = True
    num_queries, options, first, second = GRAPHS[kind]
    captured = exact_in_fp8(padded(first, 4, num_queries, fp8=fp8, **options))
    later = exact_in_fp8(padded(second, 4, num_queries, fp8=fp8, seed=1, **options))
    num_blocks = max(captured.num_blocks, later.num_blocks)
    cache = filled(captured, num_blocks)
    backend = backend_of(captured, cache)
    with torch.inference_mode():  # as a runner captures; what it made must serve everybody
        backend.init_graph_buffers(LIMITS)
        plan = backend.plan_for_graph(captured.metadata)
    idle = padded([], 4, num_queries, fp8=fp8)
    for batch in (captured, later, idle, captured):
        cache.pool.memory.zero_()
        cache.write(0, batch.past_latent, batch.past_k_rope, batch.past_slots)
        backend.replan(plan, batch.metadata)
        out = plan.forward(batch.inputs, 0)
        torch.testing.assert_close(out, batch.expected(0, filled(batch, num_blocks)), atol=1e-5, rtol=1e-5)
    first_call, second_call = (call.arguments for call in kernels.named("mla_decode")[:2])
    check_same_call(first_call, second_call)


@pytest.mark.parametrize("kind", GRAPHS)
def test_replan_allocates_nothing(kernels: StandIns, kind: str) -> None:
    num_queries, options, first, second = GRAPHS[kind]
    captured, later = (padded(requests, 4, num_queries, **options) for requests in (first, second))
    backend = backend_of(captured, MLAKVCache(captured.spec, 64))
    check_replan_allocates_nothing(backend, LIMITS, captured, later)


def test_what_a_graph_cannot_run_is_refused(kernels: StandIns) -> None:
    batch = padded([(5, 1), (2, 1)], 2, 1, mode=ForwardMode.DECODE)
    backend = backend_of(batch, filled(batch))
    with pytest.raises(ConfigError, match="init_graph_buffers"):
        backend.plan_for_graph(batch.metadata)
    with pytest.raises(ConfigError, match="init_graph_buffers"):
        backend.replan(backend.plan(batch.metadata), batch.metadata)
    backend.init_graph_buffers(LIMITS)
    with pytest.raises(ConfigError, match="not prefill"):
        backend.plan_for_graph(make([(0, 4)]).metadata)
    with pytest.raises(ConfigError, match="takes no tree mask"):
        backend.plan_for_graph(padded(VERIFY, 3, 3, drafts="tree").metadata)


# ----------------------------------------------------------------------------------------------------------- refusals


def test_trees_are_refused_by_name(kernels: StandIns) -> None:
    batch = make(VERIFY, drafts="tree")
    with pytest.raises(ConfigError, match="'trtllm_mla' takes no tree mask"):
        backend_of(batch, filled(batch)).plan(batch.metadata)


@pytest.mark.parametrize(
    ("shape", "block_size", "message"),
    [
        (SHAPE, 16, "pages of 32, 64"),
        (SHAPE, 128, "pages of 32, 64"),
        (replace(SHAPE, kv_lora_rank=256), 32, "512 numbers"),
        (replace(SHAPE, v_head_dim=64), 32, r"not \(192, 64\)"),
    ],
)
def test_what_the_kernels_lack_is_refused(kernels: StandIns, shape: MLAShape, block_size: int, message: str) -> None:
    batch = make([(0, 1)], shape=shape, block_size=block_size)
    with pytest.raises(ConfigError, match=message):
        make_attention_backend("trtllm_mla", shape, filled(batch))


def test_other_gpus_are_refused(kernels: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtllm_mla, "compute_capability", lambda device: (9, 0))
    batch = make(DECODE)
    with pytest.raises(ConfigError, match="SM90"):
        backend_of(batch, filled(batch))
