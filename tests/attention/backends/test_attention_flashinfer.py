"""The `flashinfer` back ends against the plain reference, eager, on stand-ins for its wrappers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batches import Batch, MLABatch
from flashinfer_cases import DECODE, EXTEND, MIXED, MLA, PREFIX, VERIFY, install, make, run
from flashinfer_standin import COUNTER_BYTES, FP8, StandIns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention import AttentionShape, UBatchAttention, make_attention_backend, split_attn_metadata
from attention.backends.flashinfer import pages as flashinfer_pages
from attention.backends.flashinfer.pages import INT_WORKSPACE_BYTES
from attention.backends.trtllm import mla as trtllm_mla
from ubatch import ConfigError, ForwardMode, UBatchSlice

pytestmark = pytest.mark.long


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Stand-ins in flashinfer's place."""
    standins = StandIns()
    install(monkeypatch, standins.find)
    return standins


def check(batch: Batch | MLABatch, tolerance: float = 1e-5) -> None:
    """Output and cache equal the reference's, in every layer."""
    fast, slow = batch.new_cache(), batch.new_cache()
    plan = make_attention_backend("flashinfer", batch.shape, fast).plan(batch.metadata)
    for layer in range(batch.spec.num_layers):
        out = run(plan, batch, layer)
        expected = batch.expected(layer, slow)  # type: ignore[arg-type]
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        for written, wanted in zip(fast._pools, slow._pools, strict=True):
            assert torch.equal(written.blocks(layer), wanted.blocks(layer))


# ----------------------------------------------------------------------------------------------- multi-head attention


@pytest.mark.parametrize("block_size", [1, 16, 128])
@pytest.mark.parametrize("heads", [(4, 2, 8), (2, 2, 16), (4, 1, 8)], ids=["gqa", "mha", "mqa"])
def test_decode(kernels: StandIns, heads: tuple[int, int, int], block_size: int) -> None:
    check(make(DECODE, heads=heads, block_size=block_size, num_layers=2))
    assert [call.name for call in kernels.calls] == ["decode_plan", "decode_run", "decode_run"]


@pytest.mark.parametrize(
    ("requests", "options"),
    [
        ([(0, 4), (0, 2)], {}),
        (PREFIX, {}),
        (MIXED, {}),
        (EXTEND, {"mode": ForwardMode.DRAFT_EXTEND}),
        (VERIFY, {"drafts": "chain"}),
        (VERIFY, {"drafts": "tree"}),
        ([(7, 1), (3, 1)], {"drafts": "tree"}),
    ],
    ids=["fresh", "prefix", "mixed", "draft extend", "chain", "tree", "tree of one"],
)
def test_other_batches_go_to_the_prefill_wrapper(
    kernels: StandIns, requests: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    check(make(requests, **options))
    assert [call.name for call in kernels.calls] == ["prefill_plan", "prefill_run"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options", [{"sliding_window": 3}, {"sliding_window": 1}, {"soft_cap": 1.5}, {"scale": 0.9}], ids=str
)
@pytest.mark.parametrize(
    ("requests", "drafts"), [(DECODE, None), (PREFIX, None), (VERIFY, "chain"), (VERIFY, "tree")], ids=str
)
def test_options(
    kernels: StandIns, options: dict[str, Any], requests: list[tuple[int, int]], drafts: str | None
) -> None:
    check(make(requests, shape=AttentionShape(4, 2, 8, **options), drafts=drafts))


@pytest.mark.parametrize("requests", [DECODE, PREFIX], ids=["decode", "prefix"])
def test_fp8_cache_is_read_with_its_scales(kernels: StandIns, requests: list[tuple[int, int]]) -> None:
    check(make(requests, num_layers=2, fp8=True))
    assert kernels.calls[-1].arguments["paged_kv_cache"][0].dtype == FP8


@pytest.mark.parametrize(
    ("heads", "fp8", "expected"), [((4, 2, 8), False, False), ((4, 1, 8), False, True), ((4, 2, 8), True, True)]
)
def test_decode_uses_tensor_cores_where_they_pay(
    kernels: StandIns, heads: tuple[int, int, int], fp8: bool, expected: bool
) -> None:
    check(make(DECODE, heads=heads, fp8=fp8))
    assert kernels.tensor_cores == [expected]


def test_a_stale_plan_is_refused(kernels: StandIns) -> None:
    first, second = make(DECODE), make([(9, 1), (8, 1)])
    backend = make_attention_backend("flashinfer", first.shape, first.new_cache())
    stale = backend.plan(first.metadata)
    backend.plan(second.metadata)
    with pytest.raises(ConfigError, match="stale"):
        run(stale, first)


def test_trees_follow_prefills(kernels: StandIns) -> None:
    """A wrapper keeps the kernels that its first plan chose; those for prefills may take no mask."""
    prefill, tree = make([(8, 4), (9, 4)]), make([(8, 4), (9, 4)], drafts="tree")
    backend = make_attention_backend("flashinfer", tree.shape, tree.new_cache())
    for batch in (prefill, tree, prefill):
        torch.testing.assert_close(run(backend.plan(batch.metadata), batch), batch.expected(0, batch.new_cache()))  # type: ignore[arg-type]


def test_sinks_are_refused_not_dropped(kernels: StandIns) -> None:
    batch = make(DECODE)
    assert isinstance(batch, Batch)
    backend = make_attention_backend("flashinfer", batch.shape, batch.new_cache())
    with pytest.raises(ConfigError, match="sinks is False, but sinks were given"):
        backend.plan(batch.metadata).forward(batch.q, batch.k, batch.v, 0, torch.zeros(batch.shape.num_heads))


# --------------------------------------------------------------------------------------------------- latent attention


@pytest.mark.parametrize(
    ("requests", "options"),
    [
        (DECODE, {"num_layers": 2}),
        (PREFIX, {}),
        (MIXED, {}),
        (EXTEND, {"mode": ForwardMode.DRAFT_EXTEND}),
        (VERIFY, {"drafts": "chain"}),
        (PREFIX, {"interleaved": False, "block_size": 1}),
    ],
)
def test_latent_attention_is_absorbed(
    kernels: StandIns, requests: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    check(make(requests, mla=True, **options))
    assert {call.name for call in kernels.calls} == {"mla_plan", "mla_run"}


def test_latent_attention_refuses_trees_and_fp8(kernels: StandIns) -> None:
    batch = make(VERIFY, mla=True, drafts="tree")
    with pytest.raises(ConfigError, match="'flashinfer_mla' takes no tree mask"):
        make_attention_backend("flashinfer", batch.shape, batch.new_cache()).plan(batch.metadata)
    batch = make(DECODE, mla=True, fp8=True)
    with pytest.raises(ConfigError, match="fp8"):
        make_attention_backend("flashinfer", batch.shape, batch.new_cache())
    batch = make(DECODE, mla=True, shape=replace(MLA, kv_lora_rank=256))
    with pytest.raises(ConfigError, match="512 numbers"):
        make_attention_backend("flashinfer", batch.shape, batch.new_cache())


# ---------------------------------------------------------------------------------------------------------- both kinds

BOTH = pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])


@BOTH
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 16, 64]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_batch(
    kernels: StandIns, requests: list[tuple[int, int]], block_size: int, padding: int, seed: int, mla: bool
) -> None:
    requests = [(prefix if new else 0, new) for prefix, new in requests]
    check(make(requests, mla=mla, block_size=block_size, padding=padding, seed=seed), tolerance=2e-5)


@BOTH
@pytest.mark.parametrize("requests", [[(0, 0), (20, 1), (0, 0), (3, 1), (0, 0)], [(5, 3), (0, 0), (9, 2), (0, 0)]])
def test_padding_rows_are_zero_and_padding_requests_are_left_out(
    kernels: StandIns, requests: list[tuple[int, int]], mla: bool
) -> None:
    check(make(requests, mla=mla, padding=3))


@BOTH
def test_lanes_have_their_own_workspaces(kernels: StandIns, mla: bool) -> None:
    """A prompt straddles the cut; the stand-ins refuse a workspace that two lanes use."""
    batch = make([(20, 1), (3, 5), (0, 6), (15, 1)], mla=mla)
    cache = batch.new_cache()
    attention = UBatchAttention(batch.shape, cache, "flashinfer")
    lanes = [UBatchSlice(slice(0, 3), slice(0, 8)), UBatchSlice(slice(2, 4), slice(8, 13))]
    plans = attention.plan_lanes(split_attn_metadata(lanes, batch.metadata))
    outs = []
    for number, (lane, plan) in enumerate(zip(lanes, plans, strict=True)):
        kernels.lane = f"lane {number}"
        rows = lane.token_slice
        if isinstance(batch, MLABatch):
            outs.append(plan.forward(trtllm_mla._rows(batch.inputs, rows), 0))
        else:
            outs.append(plan.forward(batch.q[rows], batch.k[rows], batch.v[rows], 0))
    torch.testing.assert_close(torch.cat(outs), batch.expected(), atol=1e-5, rtol=1e-5)
    assert [*attention.memory().values()] == [0, *[4 * COUNTER_BYTES + INT_WORKSPACE_BYTES] * 2]


def test_prefill_and_decode_may_be_different_back_ends(kernels: StandIns) -> None:
    """As on GPUs on which `trtllm_mha` only decodes: over one cache, by the kind of the batch."""
    prompts, decode = make(PREFIX), make(DECODE)
    for batch, expected in ((prompts, "prefill_run"), (decode, "decode")):
        attention = UBatchAttention(batch.shape, batch.new_cache(), prefill="flashinfer", decode="trtllm_mha")
        torch.testing.assert_close(run(attention.plan(batch.metadata), batch), batch.expected(), atol=1e-5, rtol=1e-5)
        assert kernels.calls[-1].name == expected


@BOTH
def test_old_gpus_are_refused(kernels: StandIns, monkeypatch: pytest.MonkeyPatch, mla: bool) -> None:
    monkeypatch.setattr(flashinfer_pages, "compute_capability", lambda device: (7, 5))
    batch = make(DECODE, mla=mla)
    with pytest.raises(ConfigError, match="SM75"):
        make_attention_backend("flashinfer", batch.shape, batch.new_cache())
