"""What is special about the back ends on flashinfer's kernels, over stand-ins: which kernel is called, and with what.

`test_attention_conformance` says that what comes out is right.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batches import make_batch
from attention_conformance import LIMITS, OVER_FLASHINFER, Bench, benches, check, refused
from flashinfer_cases import DECODE, EXTEND, MIXED, PREFIX, VERIFY, install
from flashinfer_standin import COUNTER_BYTES, FP8, StandIns
from torch import Tensor

from attention import GraphLimits, MLAShape, UBatchAttention, make_attention_backend
from attention.backends import flashinfer_kernels
from attention.backends.flashinfer import pages as flashinfer_pages
from attention.backends.trtllm import mha as trtllm_mha
from attention.backends.trtllm import mla_prefill
from attention.backends.trtllm.mla import padded_blocks
from ubatch import ConfigError, ForwardMode

pytestmark = pytest.mark.long

BENCHES = {bench.kind.name: bench for bench in benches() if bench.name in OVER_FLASHINFER}
of_all = pytest.mark.parametrize("bench", BENCHES.values(), ids=list(BENCHES))
MHA, MLA = BENCHES["trtllm_mha"], BENCHES["trtllm_mla"]
PADDED = [(9, 2), (62, 4), (5, 1)]
EXTENDS: dict[str, Any] = {"mode": ForwardMode.DRAFT_EXTEND}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Stand-ins in flashinfer's place."""
    standins = StandIns(exact=True)
    install(monkeypatch, standins.find)
    return standins


def names(kernels: StandIns) -> list[str]:
    return [call.name for call in kernels.calls]


# -- which kernel ------------------------------------------------------------------------------------------------------

PREFILLED = ["prefill_plan", "prefill_run"]
ABSORBED = ["mla_plan", "mla_run"]


@pytest.mark.parametrize(
    ("name", "requests", "options", "calls"),
    [
        ("flashinfer", DECODE, {}, ["decode_plan", "decode_run"]),
        ("flashinfer", PREFIX, {}, PREFILLED),
        ("flashinfer", MIXED, {}, PREFILLED),
        ("flashinfer", EXTEND, EXTENDS, PREFILLED),
        ("flashinfer", VERIFY, {"drafts": "chain"}, PREFILLED),
        ("flashinfer", [(7, 1), (3, 1)], {"drafts": "tree"}, PREFILLED),
        ("flashinfer_mla", DECODE, {}, ABSORBED),
        ("flashinfer_mla", PREFIX, {}, ABSORBED),
        ("flashinfer_mla", VERIFY, {"drafts": "chain"}, ABSORBED),
        ("trtllm_mha", DECODE, {}, ["decode"]),
        ("trtllm_mha", [(0, 4), (0, 2)], {}, ["context"]),
        ("trtllm_mha", MIXED, {}, ["context"]),
        ("trtllm_mha", EXTEND, EXTENDS, ["context"]),
        ("trtllm_mha", VERIFY, {"drafts": "chain"}, ["decode"]),
        ("trtllm_mla", DECODE, {}, ["mla_decode"]),
        ("trtllm_mla", VERIFY, {"drafts": "chain"}, ["mla_decode"]),
        ("trtllm_mla", PADDED, EXTENDS, ["mla_decode"]),
        ("trtllm_mla", [(0, 4), (0, 2)], {}, ["ragged"]),
        ("trtllm_mla", [(100, 2), (0, 3), (33, 4)], {}, ["ragged"] * 2),
        ("trtllm_mla", MIXED, {}, ["mla_decode", "ragged", "ragged"]),
        ("trtllm_mla", DECODE, {"fp8": True}, ["rope_quantize", "mla_decode"]),
        ("trtllm_mla", PREFIX, {"fp8": True}, ["ragged"] * 2),
        *((name, [(0, 0)], {"padding": 2}, []) for name in BENCHES),
    ],
)
def test_each_kind_of_batch_has_its_kernel(
    name: str, requests: Any, options: dict[str, Any], calls: list[str], kernels: StandIns
) -> None:
    check(BENCHES[name], BENCHES[name].batch(requests, **options))
    assert names(kernels) == calls


@pytest.mark.parametrize(
    ("heads", "fp8", "expected"), [((4, 2, 8), False, False), ((4, 1, 8), False, True), ((4, 2, 8), True, True)]
)
def test_decode_uses_tensor_cores_where_they_pay(heads: Any, fp8: bool, expected: bool, kernels: StandIns) -> None:
    check(BENCHES["flashinfer"], make_batch(DECODE, block_size=16, heads=heads, fp8=fp8))
    assert kernels.tensor_cores == [expected]


@pytest.mark.parametrize("bench", [MHA, MLA], ids=["mha", "mla"])
def test_fp8_queries_are_rounded_and_no_more(bench: Bench, kernels: StandIns) -> None:
    batch: Any = bench.batch(DECODE, fp8=True)
    unrounded = bench.batch(DECODE)
    name = "inputs" if bench.mla else "q"
    batch = replace(batch, **{name: getattr(unrounded, name)})
    error = (batch.forward(bench.make(batch).plan(batch.metadata)) - batch.expected()).abs().max()
    assert 1e-6 < error < 0.12
    call = kernels.named("decode")[0].arguments
    assert call["query"].dtype == FP8
    assert [pool.dtype for pool in (call["kv_cache"] if bench is MHA else [call["kv_cache"]])] == [FP8] * (
        2 - bench.mla
    )


@pytest.mark.parametrize("requests", [DECODE, MIXED], ids=["decode", "mixed"])
def test_fp8_latents_are_rotated_by_the_fused_kernel_in_either_layout(requests: Any, kernels: StandIns) -> None:
    check(MLA, MLA.batch(requests, fp8=True, interleaved=False))
    assert kernels.named("rope_quantize")


def test_sinks_are_float32_for_the_kernel() -> None:
    batch: Any = MHA.batch(DECODE, option="sinks")
    check(MHA, replace(batch, sinks=batch.sinks.to(torch.bfloat16).float()))
    half = batch.to(torch.bfloat16)
    half.forward(MHA.make(half).plan(half.metadata))  # the stand-in refuses others


def test_pools_are_read_in_place(kernels: StandIns) -> None:
    """By head, as views: nothing of the cache is copied."""
    batch = MHA.batch(DECODE)
    cache = batch.new_cache()
    batch.forward(MHA.make(batch, cache).plan(batch.metadata))
    pools = kernels.calls[0].arguments["kv_cache"]
    assert [pool.data_ptr() for pool in pools] == [cache.keys(0).data_ptr(), cache.values(0).data_ptr()]
    assert pools[0].shape == (batch.num_blocks, 2, 16, 8)


@of_all
def test_workspace_is_made_with_the_first_plan(bench: Bench) -> None:
    batch = bench.batch(DECODE)
    backend = bench.make(batch)
    backend.plan(batch.metadata)
    wrapper = flashinfer_pages.INT_WORKSPACE_BYTES if bench.name == "flashinfer" else 0
    assert backend.nbytes == 4 * COUNTER_BYTES + wrapper


def test_stand_ins_refuse_what_kernels_would_misread(kernels: StandIns) -> None:
    """Poison in a table, a sequence longer than was said, counters that are not zero, another lane's workspace."""
    batch = MHA.batch(DECODE)
    backend = MHA.make(batch)
    plan = backend.plan(batch.metadata)

    def is_refused(message: str) -> None:
        with pytest.raises(AssertionError, match=message):
            batch.forward(plan)

    table = plan.call.block_table.clone()
    plan.call.block_table[1, -1] = -1
    is_refused("before the first")
    plan.call.block_table[1, -1] = batch.num_blocks
    is_refused("behind the last")
    plan.call.block_table.copy_(table)
    plan.call.seq_lens[0] += 1
    is_refused("longer than max_seq_len")
    plan.call.seq_lens[0] -= 1
    backend.workspace.get()[7] = 1
    is_refused("counters are not zero")
    backend.workspace.get()[7] = 0
    batch.forward(plan)
    kernels.lane = "another"
    is_refused("whole and another share a workspace")


# -- wrappers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bench", [BENCHES["flashinfer"], BENCHES["flashinfer_mla"]], ids=["mha", "mla"])
def test_a_stale_plan_is_refused(bench: Bench) -> None:
    first, second = bench.batch(DECODE), bench.batch([(9, 1), (8, 1)])
    backend = bench.make(first)
    stale = backend.plan(first.metadata)
    backend.plan(second.metadata)
    with pytest.raises(ConfigError, match="stale"):
        first.forward(stale)


def test_trees_follow_prefills() -> None:
    """A wrapper keeps the kernels that its first plan chose; those for prefills may take no mask."""
    bench = BENCHES["flashinfer"]
    prefill, tree = bench.batch([(8, 4), (9, 4)]), bench.batch([(8, 4), (9, 4)], drafts="tree")
    backend = bench.make(tree)
    for batch in (prefill, tree, prefill):
        torch.testing.assert_close(batch.forward(backend.plan(batch.metadata)), batch.expected())


def test_prefill_and_decode_may_be_different_back_ends(kernels: StandIns) -> None:
    """As on GPUs on which `trtllm_mha` only decodes: over one cache, by the kind of the batch."""
    for requests, expected in ((PREFIX, "prefill_run"), (DECODE, "decode")):
        batch = MHA.batch(requests)
        attention = UBatchAttention(batch.shape, batch.new_cache(), prefill="flashinfer", decode="trtllm_mha")
        torch.testing.assert_close(batch.forward(attention.plan(batch.metadata)), batch.expected())
        assert kernels.calls[-1].name == expected


# -- tables and chunks of latents --------------------------------------------------------------------------------------


def test_tables_are_padded_to_both_tiles() -> None:
    cases = [(8192 // 64, 64, 128), (-(-4097 // 64), 64, 128), (1, 64, 64), (1, 32, 128), (0, 32, 0), (33, 128, 64)]
    assert [padded_blocks(blocks, size) for blocks, size, _ in cases] == [wanted for *_, wanted in cases]
    for block_size in (16, 32, 64, 128):
        widths = [padded_blocks(num_blocks, block_size) for num_blocks in range(1, 300, 7)]
        assert all(width >= number for number, width in zip(range(1, 300, 7), widths, strict=True))
        assert not any(width * block_size % 4096 for width in widths)
    with pytest.raises(ConfigError, match="at most 128"):
        padded_blocks(4, 256)


def test_draft_extend_is_padded_and_its_tables_reach_as_far(kernels: StandIns) -> None:
    """A request that fills its row of the table is padded past it; the stand-in refuses a table that ends before."""
    check(MLA, MLA.batch(PADDED, **EXTENDS))
    long: Any = MLA.batch([(4095, 1), (3, 5)], **EXTENDS)
    rope = replace(long.inputs.rope, positions=long.inputs.rope.positions % 1024)
    check(MLA, replace(long, inputs=replace(long.inputs, rope=rope)))
    short, call = (each.arguments for each in kernels.calls)
    assert (short["query"].shape, short["seq_lens"].tolist()) == ((3, 4, 2, 576), [13, 66, 9])
    assert call["block_tables"].shape[1] * 32 >= int(call["seq_lens"].max()) == 4100


@pytest.mark.parametrize("limit", [1, 100, 200], ids=lambda limit: f"{limit} tokens")
def test_a_prefix_is_expanded_in_chunks(kernels: StandIns, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Chunks hold whole pages, skip requests whose prefix has ended, and stay within the limit, or one page each."""
    monkeypatch.setattr(mla_prefill, "EXPANDED_TOKENS", limit)
    check(MLA, MLA.batch([(100, 2), (0, 3), (33, 4), (64, 2)]))
    chunks = [call.arguments for call in kernels.calls if not call.arguments["is_causal"]]
    assert all(len(chunk["key"]) <= max(limit, 4 * 32) for chunk in chunks)
    assert [len(chunk["seq_lens"]) for chunk in chunks] == [3, 3, 1, 1]


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["decode", "chain", "draft extend"])
@pytest.mark.parametrize("bench", [MHA, MLA], ids=["mha", "mla"])
def test_a_replay_is_the_captured_call(bench: Bench, kind: str, kernels: StandIns) -> None:
    """The same tensors, but for the query, and the same scalars, at their worst case."""
    queries = 1 if kind == "decode" else 3
    options: dict[str, Any] = {"decode": {"mode": ForwardMode.DECODE}, "chain": {"drafts": "chain"}}.get(kind, EXTENDS)
    short, long = (bench.padded([(length, queries)] * 2, 4, queries, **options) for length in (5, 70))
    backend = bench.make(long, long.empty_cache(32))
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(short.metadata)
    for batch in (short, long):
        backend.replan(plan, batch.metadata)
        batch.forward(plan)
    captured, replayed = (call.arguments for call in kernels.named("decode"))
    for name, value in captured.items():
        if isinstance(value, Tensor) and name != "query":
            assert value.data_ptr() == replayed[name].data_ptr(), name
        elif isinstance(value, int | float | str | None):
            assert value == replayed[name], name
    assert captured["max_seq_len"] >= LIMITS.max_seq_len


@of_all
@pytest.mark.parametrize(("num_queries", "options"), [(1, {}), (3, {"drafts": "chain"})], ids=["decode", "chain"])
def test_a_batch_of_padding_may_be_captured(bench: Bench, num_queries: int, options: dict[str, Any]) -> None:
    """As warm-up does, before there is any request; an idle batch has the shapes of what it is padded to."""
    batch = bench.padded([(9, num_queries), (30, num_queries)], 4, num_queries, **options)
    backend, idle = bench.make(batch), bench.padded([], 4, num_queries).metadata
    assert idle.mode is ForwardMode.IDLE
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(idle)
    backend.replan(plan, batch.metadata)
    torch.testing.assert_close(batch.forward(plan), batch.expected(), atol=1e-5, rtol=1e-5)


@of_all
def test_graph_buffers_hold_the_largest_step(bench: Bench) -> None:
    """Every request as long as it may be, and one query of four: the rest is padding, which takes pages, too."""
    size = min(bench.traits.block_sizes or (1,))
    requests = [(LIMITS.max_seq_len - 1, 1)] * LIMITS.max_reqs
    batch = bench.batch(requests, padding=18, block_size=size, **EXTENDS)
    backend = bench.make(batch)
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(batch.metadata)
    torch.testing.assert_close(batch.forward(plan), batch.expected(), atol=1e-5, rtol=1e-5)


@of_all
def test_what_cannot_be_captured_is_refused(bench: Bench) -> None:
    batch = bench.batch([(4, 1)])
    backend = bench.make(batch)
    with refused("has no graph buffers"):
        backend.replan(backend.plan(batch.metadata), batch.metadata)
    backend.init_graph_buffers(GraphLimits(6, 24, 96))
    for requests, options, message in (
        ([(0, 4)], {}, "not prefill"),
        (MIXED, {}, "not mixed"),
        ([(4, 1)], {"padding": 1}, "padded to 1 rows"),
        ([(4, 3)], {"padding": 1, "drafts": "chain"}, "padded to 3 rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            backend.plan_for_graph(bench.batch(requests, **options).metadata)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("flashinfer", {"kv_lora_rank": 256}, "512 numbers"),
        ("trtllm_mla", {"kv_lora_rank": 256}, "512 numbers"),
        ("trtllm_mla", {"v_head_dim": 64}, r"not \(192, 64\)"),
    ],
)
def test_latents_that_the_kernels_lack_are_refused(name: str, changes: dict[str, int], message: str) -> None:
    shape = replace(MLAShape(2, 512, 128, 64, 128), **changes)
    batch = MLA.batch([(0, 1)], shape=shape)
    with refused(message):
        make_attention_backend(name, shape, batch.new_cache())


def test_fp8_scales_other_than_one_are_refused() -> None:
    batch = MLA.batch(DECODE, fp8=True, num_layers=2)
    cache = batch.new_cache()
    cache.set_scale(1, 0.5)
    with refused(r"layer 1 of the cache has 0\.5"):
        MLA.make(batch, cache).plan(batch.metadata)


@pytest.mark.parametrize(
    ("name", "capability"),
    [("flashinfer", (7, 5)), ("flashinfer_mla", (7, 5)), ("trtllm_mha", (8, 0)), ("trtllm_mla", (9, 0))],
)
def test_gpus_without_kernels_are_refused(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_kernels, "compute_capability", lambda device: capability)
    with refused("SM{}{}".format(*capability)):
        BENCHES[name].make(BENCHES[name].batch(DECODE))


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_xqa_only_decodes_and_takes_queries_as_they_are(
    capability: tuple[int, int], kernels: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trtllm_mha, "compute_capability", lambda device: capability)
    kernels.xqa = True
    check(MHA, make_batch(DECODE, block_size=16, fp8=True))
    assert kernels.calls[0].arguments["query"].dtype == torch.float32
    prompts = MHA.batch(PREFIX)
    with refused("--prefill-attention-backend"):
        MHA.make(prompts).plan(prompts.metadata)
