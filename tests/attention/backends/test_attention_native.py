"""What is special about the `native` back ends: every kind of instructions against `torch`, the same bits whoever else
is in the step, on any number of threads and wherever a prompt is cut, and what the kernels in C would read past.

`test_attention_conformance` compares them with the oracle.
"""

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_batches import AnyBatch, Batch, MLABatch, make_batch, make_mla_batch
from attention_conformance import Bench, check, lanes_between
from c_kernels import KINDS, needs_c, on_threads, use_instructions
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from attention import AttentionShape, MLAShape, UBatchAttention, make_attention_backend, split_attn_metadata
from attention.backends.native import mha as native_mha
from attention.backends.native import mla as native_mla
from attention.backends.native.mha import NativeAttentionBackend
from attention.backends.native.mla import NativeMLABackend
from attention.backends.native.requests import CHUNK_KEYS
from attention.kv_cache import KVCacheError
from ubatch import ConfigError

pytestmark = [needs_c, pytest.mark.long]

LONG = 2 * CHUNK_KEYS + 45
MHA, MLA = Bench("native", False, NativeAttentionBackend), Bench("native", True, NativeMLABackend)
BOTH = pytest.mark.parametrize("bench", [MHA, MLA], ids=["mha", "mla"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SMALL = MLAShape(3, 16, 2, 4, 3, scale=0.8)
ODD = MLAShape(20, 90, 41, 34, 47)
WIDE = MLAShape(16, 128, 64, 64, 64)
HEADS = [AttentionShape(*heads) for heads in ((8, 2, 64), (5, 1, 20), (40, 8, 16), (36, 4, 16), (70, 2, 8))]
SHAPES: list[Any] = [*HEADS, SMALL, ODD, replace(WIDE, num_heads=40)]


def make(requests: list[tuple[int, int]], shape: Any, **options: Any) -> Any:
    """A batch of either kind."""
    builder: Any = make_mla_batch if isinstance(shape, MLAShape) else make_batch
    return builder(requests, shape=shape, **{"block_size": 16, **options})


def wide(bench: Bench) -> Any:
    return WIDE if bench.mla else HEADS[0]


def run(batch: Any, name: str = "native") -> Tensor:
    """One layer by the named back end."""
    plan = make_attention_backend(name, batch.shape, batch.new_cache()).plan(batch.metadata)
    out: Tensor = batch.forward(plan)
    return out


def parts(batch: Any, edges: list[int]) -> list[tuple[slice, Any]]:
    """The rows between token edges, and the batches of them alone."""
    slices = lanes_between(edges, batch.metadata)
    metadata = split_attn_metadata(slices, batch.metadata)
    return [(one.token_slice, batch.part(one.token_slice, of)) for one, of in zip(slices, metadata, strict=True)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for module in (native_mha, native_mla):
        use_instructions(monkeypatch, module, KINDS[request.param])
    kind: str = request.param
    return kind


# -- right -------------------------------------------------------------------------------------------------------------

MANY = [(0, 70), (30, 9), (100, 1), (3, 130), (0, 0), (0, 1)]
LENGTHS = [(length - 1, 1) for length in (CHUNK_KEYS - 1, CHUNK_KEYS, CHUNK_KEYS + 1, LONG, 1)]
CASES: dict[str, tuple[AttentionShape, list[tuple[int, int]], int]] = {
    "mixed": (AttentionShape(4, 2, 8), MANY, 4),
    "window": (AttentionShape(6, 2, 20, sliding_window=33), [(0, 200), (257, 90), (70, 3)], 16),
    "cap and sinks": (AttentionShape(5, 1, 80, soft_cap=1.5, sinks=True), [(10, 40), (0, 64), (1, 65)], 64),
    "large group": (AttentionShape(300, 1, 3), [(0, 40), (70, 2)], 1),
    "small windows": (AttentionShape(3, 3, 33, sliding_window=1), [(66, 70)], 16),
    "wide heads": (AttentionShape(7, 1, 160, scale=0.3), [(64, 64), (63, 66)], 16),
    "narrow values": (AttentionShape(4, 2, 80, sliding_window=65, sinks=True, v_head_dim=33), [(100, 90), (0, 70)], 16),
    "wide values": (AttentionShape(6, 2, 20, v_head_dim=160), [(64, 64), (3, 130), (70, 1)], 16),
    "eight": (AttentionShape(8, 1, 64), [(200, 100)], 16),
    **{
        f"decode, window {window}": (AttentionShape(*heads, sliding_window=window, sinks=bool(window)), LENGTHS, 16)
        for window, heads in ((None, (4, 1, 16)), (1, (70, 2, 8)), (17, (4, 1, 16)), (CHUNK_KEYS, (5, 1, 20)))
    },
    f"decode, window {CHUNK_KEYS + 1}": (AttentionShape(6, 2, 64, sliding_window=CHUNK_KEYS + 1), LENGTHS, 16),
    f"decode, window {LONG}": (AttentionShape(21, 3, 3, sliding_window=LONG, soft_cap=1.5), LENGTHS, 16),
}


@pytest.mark.sample(10)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_instructions(case: str) -> None:
    """Against `torch` in float32 of the same numbers, in float32 and in bfloat16."""
    shape, requests, block_size = CASES[case]
    batch = make_batch(requests, shape=shape, block_size=block_size, padding=2)
    for dtype, limit in ((torch.float32, 3e-6), (torch.bfloat16, 1e-2)):
        own = batch.to(dtype)
        expected = run(own.to(torch.float32), "torch")
        torch.testing.assert_close(run(own).float(), expected, atol=limit, rtol=limit)


@pytest.mark.sample(3)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("head_dim", [3, 16, 64, 80, 128])
def test_every_group_and_head_size(group: int, head_dim: int) -> None:
    check(MHA, make_batch([(40, 1), (0, 1), (15, 1), (16, 1), (129, 1)], heads=(2 * group, 2, head_dim), block_size=16))


@pytest.mark.wide
@pytest.mark.sample(4)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("shape", [SMALL, ODD, WIDE], ids=["small", "odd", "wide"])
def test_every_kind_of_instructions_over_latents(shape: MLAShape, block_size: int, interleaved: bool) -> None:
    """Decodes, drafts, chunks that are merged, and a prompt: as close to float32 as torch is in bfloat16."""
    requests = [(LONG, 1), (CHUNK_KEYS - 1, 1), (0, 1), (63, 3), (300, 2), (0, 40)]
    batch = make(requests, shape, block_size=block_size, padding=2, interleaved=interleaved)
    torch.testing.assert_close(run(batch), run(batch, "torch"), atol=5e-6, rtol=1e-5)
    half = batch.to(torch.bfloat16)
    exact = run(half.to(torch.float32), "torch")
    own, others = (run(half, name).float() - exact for name in ("native", "torch"))
    assert own.abs().max() < 0.02 * exact.abs().max()
    assert own.square().mean() < 1.05 * others.square().mean()


def grouped_shape(group: int, kv_heads: int, head_dim: int, **options: Any) -> AttentionShape:
    return AttentionShape(group * kv_heads, kv_heads, head_dim, **options)


@given(
    requests=st.lists(st.tuples(st.integers(0, 140), st.sampled_from([1, 1, 1, 0, 5, 60])), max_size=8),
    shape=st.builds(
        grouped_shape,
        group=st.integers(1, 8),
        kv_heads=st.integers(1, 3),
        head_dim=st.sampled_from([3, 8, 16, 20, 64]),
        v_head_dim=st.sampled_from([None, None, 6, 16, 80]),
        sliding_window=st.sampled_from([None, None, 1, 7, 33, 64]),
        scale=st.sampled_from([None, 0.4]),
        soft_cap=st.sampled_from([None, 1.5]),
        sinks=st.booleans(),
    ),
    options=st.fixed_dictionaries(
        {"block_size": st.sampled_from([1, 16, 64]), "padding": st.integers(0, 3), "seed": st.integers(0, 99)}
    ),
)
@example([(LONG, 1), (3, 1), (0, 5)], AttentionShape(10, 2, 64, v_head_dim=80), {"block_size": 16, "padding": 1})
@example([(LONG, 1), (LONG - 45, 1)], AttentionShape(4, 1, 20, soft_cap=1.5, sinks=True), {"block_size": 64})
def test_any_batch(requests: list[tuple[int, int]], shape: AttentionShape, options: dict[str, int]) -> None:
    """Against `torch`, which is quicker than the oracle: long, with sizes of every kind."""
    batch = make_batch([(prefix if new else 0, new) for prefix, new in requests], shape=shape, **options)
    torch.testing.assert_close(run(batch), run(batch, "torch"), atol=5e-6, rtol=1e-5)


@pytest.mark.sample(3)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("heads", [(8, 2, 64), (5, 1, 20), (70, 2, 8), (4, 4, 3)])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 17, "soft_cap": 1.5, "sinks": True}], ids=["plain", "all"])
def test_a_bfloat16_decode_gives_what_the_same_numbers_give_in_float32(heads: Any, options: dict[str, Any]) -> None:
    """Bit for bit, rounded once at the end."""
    batch = make([(30, 1), (0, 1), (LONG, 1), (CHUNK_KEYS, 1)], AttentionShape(*heads, **options)).to(torch.bfloat16)
    assert torch.equal(run(batch), run(batch.to(torch.float32)).to(torch.bfloat16))


@pytest.mark.parametrize(
    "shape", [AttentionShape(4, 2, 16, scale=30.0), replace(SMALL, scale=60.0)], ids=["mha", "mla"]
)
def test_scores_so_large_that_exponents_overflow_unless_shifted(shape: Any) -> None:
    batch = make([(40, 1), (LONG, 1), (7, 1)], shape)
    for dtype in (torch.float32, torch.bfloat16):
        assert run(batch.to(dtype)).isfinite().all()
    torch.testing.assert_close(run(batch), run(batch, "torch"), atol=1e-3, rtol=1e-3)  # scores of hundreds, to 24 bits


@DTYPES
@pytest.mark.parametrize("spoilt", [0, 1], ids=["one-chunk", "many"])
@pytest.mark.parametrize("where", ["q", "past_k", "past_latent"])
def test_what_is_not_a_number_stays_in_its_request_and_is_not_lost(where: str, spoilt: int, dtype: torch.dtype) -> None:
    batch = make([(9, 1), (LONG, 1), (30, 1)], WIDE if where == "past_latent" else AttentionShape(4, 2, 8)).to(dtype)
    x, heads = getattr(batch, where).clone(), slice(None)
    place = (spoilt, slice(0, 2)) if where == "q" else (9 * spoilt + 3, 0)
    x[place].view(-1)[:: 1 if where == "q" else 8] = math.nan
    if where != "past_latent":
        heads = slice(0, 2)  # of one key, seen by the two heads that share it
    out, clean = run(replace(batch, **{where: x})), run(batch)
    assert out[spoilt, heads].isnan().all()
    out[spoilt, heads] = clean[spoilt, heads]
    assert torch.equal(out, clean)


# -- the same whoever else is there ------------------------------------------------------------------------------------


@pytest.mark.sample(6)
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_decode_is_bit_for_bit_the_same_alone_and_on_any_threads(shape: Any, dtype: torch.dtype) -> None:
    rng = random.Random(0)
    lengths = [0, 3, CHUNK_KEYS - 1, CHUNK_KEYS, LONG, *(rng.randrange(3 * CHUNK_KEYS) for _ in range(7))]
    batch = make([(length, 1) for length in lengths], shape).to(dtype)
    whole = run(batch)
    for threads in (2, 3):
        assert torch.equal(on_threads(threads, lambda: run(batch)), whole)
    for rows, alone in parts(batch, [*range(1, len(lengths))]):
        for threads in (1, 2):  # few pieces of work: threads share a request's heads
            assert torch.equal(on_threads(threads, lambda alone=alone: run(alone)), whole[rows])


@DTYPES
@pytest.mark.parametrize("shape", [HEADS[0], HEADS[1], WIDE], ids=["wide", "odd", "latents"])
def test_a_prompt_is_bit_for_bit_the_same_alone_on_any_threads_and_wherever_it_is_cut(
    shape: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make([(20, 150), (0, 70), (30, 1), (7, 3), (0, 64)], shape).to(dtype)
    whole = run(batch)
    for threads in (1, 2, 3):
        assert torch.equal(on_threads(threads, lambda: run(batch)), whole)
    starts = batch.metadata.query_start_loc_cpu[1:-1]
    if not isinstance(shape, MLAShape):  # few latents are absorbed, which rounds otherwise
        for rows, alone in parts(batch, [*starts]):
            assert torch.equal(run(alone), whole[rows])
    backend = make_attention_backend("native", batch.shape, batch.new_cache())
    for rows, piece in parts(batch, [57, 150]):
        assert torch.equal(piece.forward(backend.plan(piece.metadata)), whole[rows])
    if isinstance(shape, MLAShape):
        small = native_mla._kernel(dtype, MOST_ROWS=32)
        monkeypatch.setattr(native_mla, "_kernel", lambda dtype: small)
        assert torch.equal(run(batch), whole)


@DTYPES
@BOTH
def test_decodes_beside_prompts_give_the_bits_of_decodes(bench: Bench, dtype: torch.dtype) -> None:
    """And drafts over latents do, too."""
    drafts = 3 if bench.mla else 1
    batch = make([(LONG, drafts), (70, 1), (0, 30)], wide(bench), padding=1).to(dtype)
    cache = batch.new_cache()
    out = batch.forward(bench.make(batch, cache).plan(batch.metadata))
    assert not out[-1].any()
    for row, (request, length) in enumerate([*((0, LONG + draft + 1) for draft in range(drafts)), (1, 71)]):
        metadata = type(batch.metadata).build(
            [1], [length], batch.metadata.block_table[request : request + 1], batch.metadata.slot_mapping[row : row + 1]
        )
        alone = batch.part(slice(row, row + 1), metadata)
        assert torch.equal(alone.forward(bench.make(batch, cache).plan(metadata))[0], out[row])


def test_more_tokens_than_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_mla_batch([(LONG, 1), (9, 4), (0, 1), (20, 3)], shape=SMALL, padding=1)
    expected = run(batch)
    whole = native_mla._kernel(torch.float32)
    assert whole.most_tokens == 256
    monkeypatch.setattr(native_mla, "_kernel", lambda dtype: replace(whole, most_tokens=2))
    assert torch.equal(run(batch), expected)


# -- memory and refusals -----------------------------------------------------------------------------------------------


def test_only_what_is_merged_needs_memory() -> None:
    batch = make_batch([(30, 1), (CHUNK_KEYS - 1, 1)])
    backend = MHA.make(batch)
    backend.plan(batch.metadata)
    assert backend.nbytes == 0
    backend.plan(make_batch([(CHUNK_KEYS, 1)]).metadata)
    assert backend.nbytes >= 2 * 4 * (8 + 2) * 4  # two parts, four heads


@BOTH
def test_a_decode_step_is_one_call_that_stores_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    batch: Any = bench.batch([(30, 1), (0, 0), (9, 1)], padding=2)
    cache, expected = batch.new_cache(), batch.new_cache()
    plan, out = bench.make(batch, cache).plan(batch.metadata), batch.expected(0, expected)
    monkeypatch.setattr(type(cache), "write", lambda *args: pytest.fail("the kernel stores"))
    torch.testing.assert_close(batch.forward(plan), out, atol=5e-6, rtol=1e-5)
    for written, wanted in zip(cache._pools, expected._pools, strict=True):
        assert torch.equal(written.blocks(0), wanted.blocks(0))


@BOTH
def test_more_threads_than_when_it_was_planned(bench: Bench) -> None:
    batch = make([(150, 1), (90, 70), (0, 9)], wide(bench))

    def compute() -> Tensor:
        torch.set_num_threads(1)
        plan = bench.make(batch).plan(batch.metadata)
        torch.set_num_threads(3)
        out: Tensor = batch.forward(plan)
        return out

    assert torch.equal(on_threads(1, compute), run(batch))


@BOTH
def test_a_plan_keeps_its_cache_alive(bench: Bench) -> None:
    batch: Any = bench.batch([(30, 1), (9, 1)])
    plan = bench.make(batch).plan(batch.metadata)
    caches = [batch.new_cache() for _ in range(4)]  # would take the freed memory
    for cache in caches:
        cache._pools[0].memory.fill_(3.0)
    assert torch.equal(batch.forward(plan), run(batch))


def changed(batch: AnyBatch, name: str, value: Tensor) -> Any:
    """The batch with another input."""
    if isinstance(batch, MLABatch):
        return replace(batch, inputs=replace(batch.inputs, **{name: value}))
    assert isinstance(batch, Batch)
    return replace(batch, **{name: value})  # type: ignore[arg-type]


@BOTH
def test_strides_of_any_kind(bench: Bench) -> None:
    batch: Any = bench.batch([(30, 1), (9, 2)])
    expected = run(batch)
    for name in ("q_nope", "q_rope", "latent", "k_rope", "w_uk", "w_uv") if bench.mla else ("q", "k", "v"):
        x = getattr(batch.inputs if bench.mla else batch, name)
        for a, b in pairwise((*range(x.dim()), 0)):
            turned = x.transpose(a, b).contiguous().transpose(a, b)
            assert turned.stride() != x.stride()
            assert torch.equal(run(changed(batch, name, turned)), expected)


@BOTH
@pytest.mark.parametrize("block", [-1, 999])
def test_tables_and_slots_that_name_no_block_are_refused(bench: Bench, block: int) -> None:
    batch = bench.batch([(30, 1), (40, 1)], block_size=4)
    table, slots = batch.metadata.block_table.clone(), batch.metadata.slot_mapping.clone()
    table[1, 10] = block
    slots[1] = batch.new_cache().hidden_slot + 4
    for changes, message in (
        ({"block_table": table}, "block table of request 1"),
        ({"block_table": table[:, :9]}, "11 blocks has a block table of 9"),
        ({"slot_mapping": slots}, "row 1 has the slot"),
    ):
        with pytest.raises(KVCacheError, match=message):
            bench.make(batch).plan(replace(batch.metadata, **changes))


@pytest.mark.parametrize(
    ("bench", "names"),
    [
        (MHA, {"q": "queries", "k": "keys", "v": "values"}),
        (MLA, {"q_nope": "queries", "q_rope": "rotated queries", "latent": "latents", "w_uv": "w_uv"}),
    ],
    ids=["mha", "mla"],
)
def test_what_the_kernel_would_read_past_is_refused(bench: Bench, names: dict[str, str]) -> None:
    batch: Any = bench.batch([(30, 1), (9, 1)])
    plan = bench.make(batch).plan(batch.metadata)
    for name, what in names.items():
        x = getattr(batch.inputs if bench.mla else batch, name)
        for wrong in (x.double(), x[:1], x[..., :1]):
            with pytest.raises(ConfigError, match=f"needs {what} "):
                changed(batch, name, wrong).forward(plan)


def test_what_else_the_kernel_would_read_past_is_refused() -> None:
    sinks: Any = MHA.batch([(30, 1)], option="sinks")
    with pytest.raises(ConfigError, match="a sink for each of its heads"):
        replace(sinks, sinks=sinks.sinks[:3]).forward(MHA.make(sinks).plan(sinks.metadata))
    batch: Any = MLA.batch([(30, 1), (9, 1)])
    plan, rope = MLA.make(batch).plan(batch.metadata), batch.inputs.rope
    for cos_sin, message in (
        (rope.cos_sin[:, :2], "need a rotary table"),
        (rope.cos_sin[:30], "token 0 is at position 30, and the rotary table ends at 30"),
    ):
        with pytest.raises(ConfigError, match=message):
            changed(batch, "rope", replace(rope, cos_sin=cos_sin)).forward(plan)


@BOTH
def test_what_native_cannot_read_auto_gives_to_torch(bench: Bench) -> None:
    for batch in (bench.batch([(30, 1)]).to(torch.float16), bench.batch([(30, 1)], fp8=True)):
        assert UBatchAttention(batch.shape, batch.new_cache()).decode_name == "torch"
